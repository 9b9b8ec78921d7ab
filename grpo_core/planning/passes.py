"""A forward and backward pass over packed sequences: how many tokens it has, what it keeps, and what is whole for a
moment if processes share the model. Imports no torch.

As FSDP2 shards: each decoder layer is gathered while it computes, and one more ahead; what is in no layer (embedding,
last norm, head) from the beginning of a pass to its end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from grpo_core.config.run import RunConfig
from grpo_core.config.teacher import source_teachers
from grpo_core.planning.architectures.parts import Part
from grpo_core.planning.hardware import GPUS_PER_MACHINE, Gpu
from grpo_core.planning.plan import Plan
from grpo_core.planning.shapes import ModelShape, PromptLengths, rank_of

FLOAT, HALF = 4, 2  # bytes
PREFETCHED = 2  # layers whose weights are whole together
UNEVEN = 0.05  # by which a process's tokens may exceed the mean, see `training.batch`


@dataclass(frozen=True)
class Pass:
    """Sizes of one process's pass. Each prompt counts once, whatever the number of its completions in the pass."""

    tokens: float  # of prompts and completions
    keys: float  # that attention reads: those of each completion, and its prompt's once more
    completions: float  # tokens of completions, whose logits are computed
    alone: bool = False  # it is the only one of its update: gradients come into being while its activations go
    rows: float = 0.0  # completions
    longest: float = 0.0  # tokens of one, with its prompt

    @property
    def in_rows(self) -> float:
        """Tokens if each completion has its prompt in front of it."""
        return max(self.tokens, self.rows * self.longest)


@dataclass(frozen=True)
class Activations:
    """Bytes of a pass that lie between its forward and its backward pass."""

    layers: float  # kept of all layers
    outside: float  # kept of what follows them
    in_norm: float  # besides all of these, in the backward pass of the last norm
    in_layer: float  # besides those of the layers, in the backward pass of a layer

    @property
    def kept(self) -> float:
        return self.layers + self.outside


def longest_sequence(config: RunConfig, lengths: PromptLengths) -> int:
    """Tokens of the longest prompt with a completion of full length: no pass can have fewer at most."""
    return lengths.longest + config.rollout.max_completion_length


def planned_pass(config: RunConfig, plan: Plan, lengths: PromptLengths, shape: ModelShape | None = None) -> Pass:
    """The largest pass of a plan: completions of full length after the longest prompts."""
    completion, group = config.rollout.max_completion_length, plan.num_generations
    longest = longest_sequence(config, lengths)
    whole = update_tokens(plan, lengths.longest, completion)
    tokens = min(plan.max_tokens_per_pass or most_tokens(config, plan, lengths), math.ceil(whole))
    packs = shape is None or shape.packs(longest)
    rows = group * tokens / (lengths.longest + group * completion) if packs else tokens / longest
    # Flash attention, which takes no float32, has the keys of each sequence next to each other.
    repeated = rows * lengths.longest * (width(config) == HALF) * packs
    return Pass(tokens, tokens + repeated, rows * completion, whole <= tokens, rows, longest)


def most_tokens(config: RunConfig, plan: Plan, lengths: PromptLengths) -> int:
    """Tokens of a pass where memory sets no limit: those of b sequences of the greatest length, or of the update if it
    has fewer."""
    whole = update_tokens(plan, lengths.longest, config.rollout.max_completion_length)
    return min(plan.per_device_train_batch_size * longest_sequence(config, lengths), math.ceil(whole))


def update_tokens(plan: Plan, prompt: float, completion: float) -> float:
    """Tokens of an update's passes in one process, for prompts and completions of these lengths."""
    rows, group = plan.gradient_accumulation_steps * plan.per_device_train_batch_size, plan.num_generations
    # An update that takes a part of a generation batch has rows of any of its groups.
    whole = plan.gradient_accumulation_steps % plan.steps_per_generation == 0
    prompts = math.ceil(rows / group) if whole else min(rows, plan.prompts_per_generation)
    tokens = prompts * prompt + rows * completion
    return tokens if plan.num_processes == 1 else (1 + UNEVEN) * tokens + prompt


def passes_per_update(config: RunConfig, plan: Plan, lengths: PromptLengths, prompt: float, completion: float) -> int:
    """Number of passes that an update takes in one process, for prompts and completions of these mean lengths."""
    return math.ceil(update_tokens(plan, prompt, completion) / planned_pass(config, plan, lengths).tokens)


def activations(config: RunConfig, shape: ModelShape, size: Pass) -> Activations:
    """Bytes that a pass keeps, which is what autograd saves of transformers' layers, and what it needs besides. Tests
    compare both with torch's own counts."""
    w, h = width(config), shape.hidden
    norm = _norm(config, shape)
    kept = [(_kept(config, shape, layer, size), number) for layer, number in shape.kinds]
    # The last norm, whose result is kept for completions only, and the rotation's angles.
    outside = size.tokens * (norm * h + FLOAT + w * 2 * shape.head) + size.completions * w * h
    # Log-probabilities of the whole vocabulary, and what a cap makes of all tokens' logits.
    own = FLOAT * size.completions * shape.own_logits + w * size.tokens * shape.caps_logits
    outside += own * shape.vocabulary
    # In an MLP: gradients of the product, of both factors, and of what is around it; the product itself is gone. Of
    # experts, those of the largest weights, and in 4 bits, the weights of one projection at a time.
    widest = max(2 * w * size.tokens * part.widest + FLOAT * size.in_rows * part.recurred for part, _ in shape.parts)
    gradients = widest + size.tokens * w * 2 * h
    if config.model.load_in_4bit or shape.has_experts:
        gradients += w * max(it.inputs * it.outputs * it.copies for it, _ in shape.linear)
    again = config.train.gradient_checkpointing  # then a layer keeps its input, until it is computed again
    return Activations(
        layers=sum(number * (size.tokens * w * h if again else one) for one, number in kept),
        outside=outside,
        in_norm=size.tokens * 5 * FLOAT * h,  # gradients and powers of its input
        in_layer=gradients + max(one for one, _ in kept) * again,
    )


def _norm(config: RunConfig, shape: ModelShape) -> float:
    """Bytes that a norm keeps of a number: its input in float32, and its result without the weight if that is trained;
    one number per token comes on top."""
    trained = not config.model.use_peft or bool(config.model.lora_modules_to_save)
    return FLOAT + (FLOAT * shape.float_norms or width(config)) * trained


def _kept(config: RunConfig, shape: ModelShape, layer: Sequence[Part], size: Pass) -> float:
    """Bytes that a layer keeps. Linear layers keep their input for their weight's gradient, or for an adapter's."""
    w, norm, model = width(config), _norm(config, shape), config.model
    total, inputs = 0.0, {}
    for part in layer:
        tokens = size.in_rows if part.chunk else size.tokens
        if size.longest and part.chunk:
            tokens *= math.ceil(size.longest / part.chunk) * part.chunk / size.longest
        total += w * (tokens * part.half + size.keys * part.keys) + FLOAT * tokens * part.single
        total += tokens * sum(norm * number + FLOAT * statistics for number, statistics in part.norms)
        total += size.tokens * size.longest * part.score_bytes
        for linear in part.linear:
            if model.use_peft:
                if not (rank := rank_of(linear, config)):
                    continue
                # Between the two matrices of an adapter; of experts, peft keeps all weights with their change.
                experts = linear.copies * linear.inputs * linear.outputs
                total += w * (experts if linear.copies > 1 else tokens * rank)
            if model.use_peft and model.lora_dropout:  # an adapter's own input with zeros, and a mask of bytes
                total += tokens * (w + 1) * linear.inputs
            elif linear.source:
                inputs[linear.source] = tokens * w * linear.inputs * linear.taken
    return total + sum(inputs.values())


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


def teacher_passes(
    config: RunConfig,
    plan: Plan,
    lengths: PromptLengths,
    completion: float,
    shape: ModelShape | None,
    teachers: Mapping[str, ModelShape],
) -> float:
    """Forward passes of the policy that those of the teacher over a completion take as long as, by the tokens that it
    reads and the parameters that each passes: one, or for a divergence one in each update and the products of both
    output layers; 0 without a teacher. With teachers of sources, the mean over the prompts of an epoch."""
    if not shape or not (teachers or config.teacher.is_policy):
        return 0.0
    g = plan.num_generations if shape.packs(longest_sequence(config, lengths)) else 1
    shown = lengths.mean + max(lengths.shown - lengths.longest, 0)
    if shares := config.teacher.shown_completions:  # of a group, each completion has a prompt of its own
        shown -= shares * (config.rollout.max_completion_length - completion)
    read = g * (shown + completion) if shares else shown + g * completion

    def products(it: ModelShape, tokens: float, heads: float = 1.0) -> float:
        return (it.active - it.outside) * tokens + heads * it.vocabulary * it.hidden * g * completion

    weights = dict.fromkeys(teachers or {"": shape}, 1.0)
    if names := source_teachers(config):
        prompts = [(names[it.name], it.prompts_per_epoch / plan.num_prompts) for it in plan.sources]
        weights = {name: sum(share for of, share in prompts if of == name) for name in weights}
    diverges = config.teacher.diverges  # the teacher's head twice; the policy's twice more, and for two gradients
    passes = sum(
        weight * (products(teachers.get(name, shape), read, 1.0 + diverges) + diverges * products(shape, 0.0, 4.0))
        for name, weight in weights.items()
    )
    each = passes / products(shape, lengths.mean + g * completion)
    return each * (config.train.num_iterations if diverges else 1)
