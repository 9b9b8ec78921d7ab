"""Number of processes that share a model, and memory of weights and gradients that are whole for a moment.

As FSDP2 shards: each decoder layer is gathered while it computes, and one more ahead; what is in no layer (embedding,
last norm, head) from the beginning of a pass to its end. Imports no torch.
"""

from __future__ import annotations

from grpo_core.config.run import RunConfig
from grpo_core.planning.hardware import GPUS_PER_MACHINE, Gpu
from grpo_core.planning.shapes import ModelShape

FLOAT, HALF = 4, 2  # bytes
PREFETCHED = 2  # layers whose weights are whole together


def width(config: RunConfig) -> int:
    """Bytes per number that passes compute with."""
    return HALF if config.train.mixed_precision == "bf16" else FLOAT


def per_machine(config: RunConfig, gpu: Gpu) -> int:
    """Training processes per machine, one per GPU. With one machine configured: at most the GPUs of this machine, or
    GPUS_PER_MACHINE if these are not known."""
    if config.train.num_machines > 1:
        return config.train.processes_per_machine
    return min(config.train.num_processes, gpu.per_machine or GPUS_PER_MACHINE)


def sharing_processes(config: RunConfig, gpu: Gpu) -> int:
    """Processes that hold one copy of weights, gradients and optimizer state together."""
    if config.train.sharding == "hybrid":
        return per_machine(config, gpu)
    return config.train.num_processes if config.train.sharding == "full" else 1


def describe_sharing(config: RunConfig, gpu: Gpu) -> str:
    """Say by how many processes the model is shared, as part of a sentence; "" if each holds all of it."""
    if config.train.sharding == "none":
        return ""
    known = gpu.per_machine or config.train.num_machines > 1 or config.train.sharding != "hybrid"
    assumed = "" if known else f" ({GPUS_PER_MACHINE} GPUs per machine are assumed)"
    return f"the model shared by {sharing_processes(config, gpu)} processes{assumed}; "


def working_set(
    config: RunConfig, shape: ModelShape, kept: float, recomputed: float, logits: float, head_gradient: float
) -> dict[str, float]:
    """Bytes of a sharded pass besides the shares, at its worst moment, by their parts.

    `kept`, `recomputed`: activations, see `memory.activations`. `logits`: those of a chunk. `head_gradient`: the
    float32 sum of the output layer's gradient, 0 if it is frozen. Tests compare the moments with what torch counts in
    FSDP2.
    """
    w, outside, layer = width(config), shape.outside, shape.largest_layer
    gathered = w * (outside + PREFETCHED * layer)
    lora = config.model.use_peft  # then what is gathered is frozen
    head = w * shape.vocabulary * shape.hidden * (not lora)  # its gradient, from its sum to the end of the pass
    moments: list[dict[str, float]] = [
        # At the beginning, when the first weights are copied out of the buffer that they arrived in.
        {"gathered": 2 * w * (outside + layer)},
        # In the output layer: the last chunk, and then the sum of its gradient in the precision of the pass.
        {"gathered": gathered, "activations": kept, "logits": logits + head_gradient},
        {"gathered": gathered, "activations": kept, "logits": head_gradient, "unsharded_gradients": head},
        # In a layer.
        {"gathered": gathered, "activations": kept + recomputed},
    ]
    if not lora:
        moments.extend(
            [
                # The same, while the gradients of the one before are reduced.
                {
                    "gathered": gathered,
                    "activations": kept + recomputed,
                    "unsharded_gradients": head + w * layer,
                    "reduce_scatter": FLOAT * layer,
                },
                # In the embedding; a tied head's gradient is added to its own, out of place.
                {
                    "gathered": w * outside,
                    "unsharded_gradients": head * (3 if shape.is_tied else 2),
                    "reduce_scatter": FLOAT * layer,
                },
                # At the end, when the weights are given back.
                {"unsharded_gradients": w * outside, "reduce_scatter": FLOAT * outside},
            ]
        )
    return max(moments, key=lambda parts: sum(parts.values()))
