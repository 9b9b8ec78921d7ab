"""Forecasts of a planned run: memory, communication, time, and the share of groups with a signal, each with how it
was made.

Forecasts are estimates; the plan is exact. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from grpo_core.config.run import RunConfig
from grpo_core.errors import ConfigError
from grpo_core.planning.ahead_forecast import CPU_SLOTS, GPU_SLOTS, EarlierSampling, advise
from grpo_core.planning.hardware import BETWEEN_MACHINES, TO_HOST, WITHIN_MACHINE, Gpu
from grpo_core.planning.memory import (
    PlannedRun,
    check_engine_memory,
    check_host_memory,
    check_teacher_memory,
    moments,
    peak_memory,
    sends_adapter,
    sends_by_nccl,
)
from grpo_core.planning.pace import NOT_VALIDATED, Pace, Throughput, ValidatedCosts
from grpo_core.planning.passes import FLOAT, passes_per_update, per_machine, sharing_processes, width
from grpo_core.planning.plan import Plan
from grpo_core.planning.remedies import NOTHING_FITS, remedies
from grpo_core.planning.shapes import (
    ForecastError,
    ModelShape,
    PromptLengths,
    adapter_parameters,
    load_shape,
    load_teachers,
)
from grpo_core.planning.wall_time import WarmStart, scorings, wall_time
from grpo_core.system.memory import GIB, gib_text

TITLES = {
    "gpus": "GPUs",
    "memory": "peak memory per GPU",
    "communication": "communication per update",
    "time": "wall time",
    "sampling_ahead": "sampling ahead",
    "useful_groups": "groups with a signal",
}
PARTS_FROM = 0.01  # of the whole time; smaller parts are not shown


def forecast(
    config: RunConfig,
    plan: Plan,
    lengths: PromptLengths,
    source: Throughput | Pace | str | None,
    pass_rates: Sequence[float],
    gpu: Gpu | None,
    *,
    costs: ValidatedCosts = NOT_VALIDATED,
    sampling: EarlierSampling | str | None = None,
    warm: WarmStart | None = None,
) -> dict[str, dict[str, Any]]:
    """Time, useful groups and, on GPUs, memory and communication: each with `how` it was made, or with the `error` that
    prevented it; with vLLM servers the GPUs too. If memory does not suffice, it has the `remedies` that would fit.

    `source`: the pace of earlier runs, or the one measured, or the reason why there is neither. `gpu`: the GPU to train
    on; None for a CPU. `sampling`: an earlier training's, from which to say how far to sample ahead, or the reason why
    it is not known; None if the run cannot sample ahead. `warm`: as `wall_time` takes it. Raises ConfigError if there
    are certainly too few GPUs for the servers, or too little memory: in vLLM's share of the GPU, or in the host for
    what is offloaded; if weights cannot be put together for servers; or if processes would get no expert.
    """
    found: dict[str, dict[str, Any]] = {}
    shape, teachers = None, {}
    if gpu and config.rollout.server_gpus:
        found["gpus"] = count_gpus(config, gpu)
    try:
        shape, teachers = load_shape(config.model.name_or_path, config.model.revision), load_teachers(config)
        _check_hand_over(config, shape)
        for name, each in {config.model.name_or_path: shape, **teachers}.items():
            _check_experts(config, name, each, gpu)
        if gpu:
            run, longest = PlannedRun(config, plan, shape, lengths, gpu, teachers), config.rollout.max_completion_length
            completion = longest if source is None or isinstance(source, str) else source.completion_tokens
            found["memory"] = _memory(run, min(completion, longest))
            if plan.num_processes > 1 or config.train.offload == "optimizer" or sends_by_nccl(config):
                passes = passes_per_update(config, plan, lengths, lengths.longest, longest)
                found["communication"] = communication(run, passes)
    except ForecastError as error:
        if gpu:
            found["memory"] = {"error": str(error)}
    useful = useful_groups(pass_rates, plan.num_generations) if pass_rates else {}
    if isinstance(source, str):
        found["time"] = {"error": source}
    else:
        try:
            silent = useful.get("silent_share")
            sizes = shape, gpu, teachers
            found["time"] = wall_time(
                config,
                plan,
                lengths,
                source,
                *sizes,
                costs=costs,
                silent_share=silent,
                warm=warm,
                communication=found.get("communication", {}).get("seconds_per_update", 0.0),
            )
        except ForecastError as error:
            found["time"] = {"error": str(error)}
    if isinstance(sampling, str):
        found["sampling_ahead"] = {"error": sampling}
    elif sampling is not None:
        found["sampling_ahead"] = advise(config, plan, sampling, GPU_SLOTS if gpu else CPU_SLOTS)
    if useful:
        found["useful_groups"] = useful
    return found


def _check_hand_over(config: RunConfig, shape: ModelShape) -> None:
    """Raises ConfigError if servers get an adapter merged into a base that several machines share."""
    train, rank, where = config.train, config.model.lora_r, ", of experts" * shape.has_experts
    shared = train.sharding == "full" and train.num_machines > 1
    if shared and config.rollout.engine == "vllm-server" and not sends_adapter(config, shape):
        raise ConfigError(
            f"rollout.engine='vllm-server', train.sharding='full' and train.num_machines={train.num_machines}: this "
            f"adapter (model.lora_r={rank}{where}) goes to servers merged into weights, put together from the memory "
            "of one machine, and each has a part of them; set train.sharding to 'hybrid', or rollout.engine to 'vllm'"
        )


def _check_experts(config: RunConfig, name: str, shape: ModelShape, gpu: Gpu | None) -> None:
    """Raises ConfigError if some processes would hold none of the experts, which transformers stacks as it loads them:
    each gets as many as the first, until there are none left."""
    if not shape.has_experts or shape.fused_experts:
        return
    count, sharding = max(linear.copies for linear, _ in shape.linear), config.train.sharding
    processes = sharing_processes(config, gpu) if gpu else {"full": config.train.num_processes}.get(sharding, 1)

    def all_have_some(number: int) -> bool:
        return -(-count // number) * (number - 1) < count

    if not all_have_some(processes):
        fewer = next(number for number in range(processes, 0, -1) if all_have_some(number))
        raise ConfigError(
            f"train.sharding={sharding!r} over {processes} processes: each would hold {-(-count // processes)} of the "
            f"{count} experts of a layer of {name!r}, the last ones none, and transformers loads no part without "
            f"experts; share the model by {fewer} processes"
        )


def count_gpus(config: RunConfig, gpu: Gpu) -> dict[str, Any]:
    """GPUs of the training and of the servers that it starts, and where the servers are.

    Raises ConfigError if they are all on this machine and it has fewer.
    """
    train, rollout, hosts = config.train, config.rollout, config.launch.server_hosts
    each = rollout.vllm_tensor_parallel_size * rollout.vllm_data_parallel_size
    asked = f"rollout.vllm_num_servers={rollout.vllm_num_servers} with {each} each (vllm_tensor_parallel_size · "
    asked += "vllm_data_parallel_size)"
    needed = train.num_processes + rollout.server_gpus
    if not config.servers_elsewhere and gpu.per_machine is not None and needed > gpu.per_machine:
        raise ConfigError(
            f"train.num_processes={train.num_processes} and {asked} need {needed} GPUs, and this machine has "
            f"{gpu.per_machine}: lower one of these keys, or name other machines in launch.server_hosts"
        )
    where = f"the first of {', '.join(hosts)} that answer" if hosts else "this machine, after the training's"
    where = "further machines of the job, one each" if config.servers_in_job else where
    return {"training": train.num_processes, "servers": rollout.server_gpus, "how": f"{asked}, on {where}"}


def _memory(run: PlannedRun, completion: float) -> dict[str, Any]:
    """Peak memory, with the remedies that would fit if it does not suffice, and the passes of an update whose
    completions have `completion` tokens in the mean. Raises ConfigError if certainly nothing could start."""
    memory = peak_memory(run)
    memory["passes_per_update"] = passes_per_update(run.config, run.plan, run.lengths, run.lengths.mean, completion)
    memory["completion_tokens"] = completion
    if "warning" in memory:
        memory["remedies"] = remedies(run)
    try:
        check_teacher_memory(run)
        check_engine_memory(run)
        check_host_memory(run)
    except ConfigError as error:
        text = "would fit, with {} per GPU: {}"
        found = [text.format(gib_text(each["peak_memory_gib"]), each["change"]) for each in memory.get("remedies", [])]
        raise ConfigError("\n".join([str(error), *found])) from error
    return memory


def useful_groups(pass_rates: Sequence[float], num_generations: int) -> dict[str, Any]:
    """Expected share of groups with a signal: 1 − E[p^G + (1−p)^G], for rewards of 0 or 1 and pass rates p."""
    if not all(0 <= p <= 1 for p in pass_rates):
        return {"error": f"a pass rate lies between 0 and 1; given is {max(pass_rates, key=lambda p: abs(p - 0.5)):g}"}
    g = num_generations
    silent = sum(p**g + (1 - p) ** g for p in pass_rates) / len(pass_rates)
    how = f"1 − E[p^G + (1−p)^G], G = {g}, over {len(pass_rates)} known pass rates p"
    return {"share": 1 - silent, "silent_share": silent, "how": how}


def forecast_rows(forecasts: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str, str]]:
    """The forecasts in words: quantity, value, how it was made."""
    for name, found in forecasts.items():
        title = TITLES[name]
        if "error" in found:
            needs_run = name in ("time", "sampling_ahead")
            yield title, "unknown until a first run" if needs_run else "unknown", found["error"]
        elif name == "gpus":
            yield title, f"{found['training']} for the training, {found['servers']} for vLLM servers", found["how"]
        elif name == "memory":
            warning = f": {found['warning']}" if "warning" in found else ""
            yield title, gib_text(found["peak_memory_gib"]) + warning, found["how"]
            yield from _sizes(found)
            yield (
                "  tokens in a pass",
                f"{found['tokens_per_pass']:,}",
                f"at most; an update with completions of {found['completion_tokens']:.0f} tokens takes "
                f"{found['passes_per_update']} pass{'es' * (found['passes_per_update'] > 1)} per process",
            )
            if "host_memory_gib" in found:
                yield (
                    "  host's memory",
                    gib_text(found["host_memory_gib"]),
                    "AdamW's moments of a machine's processes",
                )
            if "remedies" in found:
                fitting = [("  would fit", gib_text(it["peak_memory_gib"]), it["change"]) for it in found["remedies"]]
                yield from fitting or [("  would fit", "nothing", NOTHING_FITS)]
        elif name == "communication":
            yield title, _duration(found["seconds_per_update"] / 3600), found["how"]
            yield from _sizes(found)
        elif name == "time":
            ends = found.get("interval_hours", [found["wall_time_hours"]])
            yield title, " to ".join(map(_duration, ends)), found["how"]
            parts, least = found["parts_hours"], PARTS_FROM * found["wall_time_hours"]
            middle = "middle of the interval" if "interval_hours" in found else ""
            yield from ((f"  {part}", _duration(hours), middle) for part, hours in parts.items() if hours >= least)
            if "gpu_hours" in found:
                gpus = found["gpu_hours"] / found["wall_time_hours"]
                yield "GPU hours", " to ".join(f"{gpus * hours:.2f}" for hours in ends), ""
        elif name == "sampling_ahead":
            yield from _ahead_rows(title, found)
        else:
            yield title, f"{found['share']:.1%}", found["how"]


def _ahead_rows(title: str, found: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    paces, waiting = found["updates_per_hour"], found["waiting_share"]
    each = ", ".join(f"{staleness}: {pace:.3g}" for staleness, pace in paces.items())
    yield title, f"max_staleness = {found['max_staleness']}; updates per hour {each}", found["how"]
    each = ", ".join(f"{servers}: {share:.0%}" for servers, share in waiting.items())
    yield "  vLLM servers", f"{found['servers']}; the trainer waits {each} of its time", ""


def _sizes(found: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    return ((f"  {part}", gib_text(size), "") for part, size in found["parts_gib"].items() if size)


def _duration(hours: float) -> str:
    return f"{hours:.1f} h" if hours >= 1 else f"{60 * hours:.1f} min" if hours >= 1 / 60 else f"{3600 * hours:.1f} s"


def communication(run: PlannedRun, passes: int) -> dict[str, Any]:
    """Bytes between GPUs per update of that many `passes`, and the seconds that they take by themselves.

    Parts: `gathered`, the weights that a process receives; `reduced`, the gradients that it sends, in float32;
    `between_machines`, what a machine receives from the others; `offloaded`, the moments that come from the host's
    memory and go back; `to_servers`, what leaves the process that sends weights to vLLM servers. A pass gathers the
    layers twice (forward, backward) and the rest once, and reduces all gradients; without sharding, and of an adapter,
    they are reduced once per update. The pass without an adapter's dropout gathers every weight once more. Scoring
    (old, reference and each teacher's log-probabilities) and the hand-over to the engine gather every weight once; with
    a divergence, each pass gathers the teachers'.
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
        read = passes if config.teacher.diverges else rollouts * plan.steps_per_generation
        numbers += read * sum(it.parameters for it in run.teaching)
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
    to_servers, sending = (rollouts * each for each in _hand_over(run))
    found = {"gathered": gathered, "reduced": reduced, "between_machines": crossing, "offloaded": offloaded}
    found["to_servers"] = to_servers
    assumed = [f"{WITHIN_MACHINE / 1e9:g} GB/s per GPU within a machine"] * (processes > 1)
    assumed += [f"{BETWEEN_MACHINES / 1e9:g} GB/s per machine to the others"] * (machines > 1)
    assumed += [f"{TO_HOST / 1e9:g} GB/s between a GPU and its host's memory"] * bool(offloaded)
    assumed += [f"weights to servers at {_to_servers(config) / 1e9:g} GB/s, one copy for all"] * bool(to_servers)
    seconds = (gathered + reduced) / WITHIN_MACHINE + crossing / BETWEEN_MACHINES + offloaded / TO_HOST + sending
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


def _hand_over(run: PlannedRun) -> tuple[float, float]:
    """Bytes of one hand-over that leave the process that sends to vLLM servers on GPUs, and the seconds that they take:
    one copy of the weights by NCCL whatever the number of servers, which comes from the host's memory if the model is
    sharded, or the adapter to each server."""
    config, rollout = run.config, run.config.rollout
    if not sends_by_nccl(config):
        return 0.0, 0.0
    alone, from_host = sends_adapter(config, run.shape), config.train.sharding != "none"
    servers = len(rollout.vllm_server_base_urls) or rollout.vllm_num_servers
    sent = servers * adapter_parameters(run.shape, config) if alone else run.shape.parameters
    size = float(width(config) * sent)
    return size, size / _to_servers(config) + size * (from_host and not alone) / TO_HOST


def _to_servers(config: RunConfig) -> float:
    """Bytes per second to servers."""
    elsewhere = config.servers_elsewhere or config.rollout.vllm_server_base_urls
    return BETWEEN_MACHINES if elsewhere else WITHIN_MACHINE


def _others_fraction(processes: int) -> float:
    """Fraction of an array that other processes hold if all processes hold equal parts of it."""
    return (processes - 1) / processes
