"""Bytes that training processes send each other, and their hosts, per update. Imports no torch."""

from __future__ import annotations

import math
from typing import Any

from grpo_core.planning.hardware import BETWEEN_MACHINES, TO_HOST, WITHIN_MACHINE
from grpo_core.planning.memory import PlannedRun, moments
from grpo_core.planning.shapes import adapter_parameters
from grpo_core.planning.sharding import FLOAT, per_machine, sharing_processes, width
from grpo_core.planning.wall_time import scorings
from grpo_core.system.memory import GIB


def communication(run: PlannedRun, passes: int) -> dict[str, Any]:
    """Bytes between GPUs per update of that many `passes`, and the seconds that they take by themselves.

    Parts: `gathered`, the weights that a process receives; `reduced`, the gradients that it sends, in float32;
    `between_machines`, what a machine receives from the others; `offloaded`, the moments that come from the host's
    memory and go back. A pass gathers the layers twice (forward, backward) and the rest once, and reduces all
    gradients; without sharding, and of an adapter, they are reduced once per update. The pass without an adapter's
    dropout gathers every weight once more. Scoring
    (old and reference log-probabilities) and the hand-over to the engine gather every weight once.
    """
    config, plan, shape, gpu = run.config, run.plan, run.shape, run.gpu
    lora, sharding = config.model.use_peft, config.train.sharding
    processes, sharing = plan.num_processes, sharing_processes(config, gpu)
    machines = math.ceil(processes / per_machine(config, gpu))
    rollouts = plan.rollouts / plan.max_steps
    scored = plan.steps_per_generation * scorings(config, plan)
    weights = 0.0
    if sharding != "none":
        numbers: float = passes * (2 * shape.parameters - shape.outside)
        numbers += passes * shape.parameters * (config.model.lora_dropout > 0)
        numbers += rollouts * (scored + (not lora)) * shape.parameters
        weights = width(config) * numbers
    trained = adapter_parameters(shape, config) if lora else shape.parameters
    gradients = FLOAT * trained * (1 if lora or sharding == "none" else passes)
    if lora or sharding == "none":  # an all-reduce: everything goes around twice
        reduced, crossing = 2 * _others_fraction(processes) * gradients, 2.0 * gradients
    elif sharding == "full":
        reduced, crossing = _others_fraction(processes) * gradients, gradients
    else:
        reduced = _others_fraction(sharing) * gradients + 2 * _others_fraction(machines) * gradients / sharing
        crossing = 2 * gradients
    crossing = _others_fraction(machines) * (crossing + weights * (sharding == "full"))
    gathered = _others_fraction(sharing) * weights
    offloaded = 2 * moments(run) * (config.train.offload == "optimizer")
    found = {"gathered": gathered, "reduced": reduced, "between_machines": crossing, "offloaded": offloaded}
    assumed = [f"{WITHIN_MACHINE / 1e9:g} GB/s per GPU within a machine"] * (processes > 1)
    assumed += [f"{BETWEEN_MACHINES / 1e9:g} GB/s per machine to the others"] * (machines > 1)
    assumed += [f"{TO_HOST / 1e9:g} GB/s between a GPU and its host's memory"] * bool(offloaded)
    seconds = (gathered + reduced) / WITHIN_MACHINE + crossing / BETWEEN_MACHINES + offloaded / TO_HOST
    return {
        "seconds_per_update": seconds,
        "parts_gib": {name: size / GIB for name, size in found.items()},
        "passes_per_update": passes,
        "how": (
            f"estimate for {processes} process{'es' * (processes > 1)} on {machines} machine{'s' * (machines > 1)}, "
            f"per process; {passes} passes per update, fewer if completions are short; assumed, not measured: "
            f"{', '.join(assumed)}"
            + "; computation hides part of it" * (processes > 1)
            + ", but not of the way to the host and back" * (processes > 1 and offloaded > 0)
        ),
    }


def _others_fraction(processes: int) -> float:
    """Fraction of an array that other processes hold if all processes hold equal parts of it."""
    return (processes - 1) / processes
