"""A forward and backward pass over packed sequences: how many tokens it has, and what it keeps. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from grpo_core.config.run import RunConfig
from grpo_core.planning.plan import Plan
from grpo_core.planning.shapes import ModelShape, PromptLengths, adapted_inputs
from grpo_core.planning.sharding import FLOAT, HALF, width

# Projections with a common input.
SAME_INPUT = {"q_proj": 0, "k_proj": 0, "v_proj": 0, "gate_proj": 1, "up_proj": 1, "down_proj": 2}
UNEVEN = 0.05  # by which a process's tokens may exceed the mean, see `training.batch`


@dataclass(frozen=True)
class Pass:
    """Sizes of one process's pass. Each prompt counts once, whatever the number of its completions in the pass."""

    tokens: float  # of prompts and completions
    keys: float  # that attention reads: those of each completion, and its prompt's once more
    completions: float  # tokens of completions, whose logits are computed
    alone: bool = False  # it is the only one of its update: gradients come into being while its activations go


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


def planned_pass(config: RunConfig, plan: Plan, lengths: PromptLengths) -> Pass:
    """The largest pass of a plan: completions of full length after the longest prompts."""
    completion, group = config.rollout.max_completion_length, plan.num_generations
    whole = update_tokens(plan, lengths.longest, completion)
    tokens = min(plan.max_tokens_per_pass or most_tokens(config, plan, lengths), math.ceil(whole))
    groups = tokens / (lengths.longest + group * completion)  # with one prompt each
    # Flash attention, which takes no float32, has the keys of each sequence next to each other.
    repeated = groups * group * lengths.longest * (width(config) == HALF)
    return Pass(tokens, tokens + repeated, groups * group * completion, alone=whole <= tokens)


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
    # A norm keeps its input in float32, one number of it per token and, if its weight is trained, its result without
    # the weight.
    norm = FLOAT + w * (not config.model.use_peft or bool(config.model.lora_modules_to_save))
    layer = 2 * (norm * h + FLOAT) + _inputs(config, shape)
    # Queries, attention's output, the logarithm of its sum; in the MLP, gate, its activation and what it multiplies.
    layer += w * 2 * shape.attention + FLOAT * shape.heads + w * 3 * shape.widest
    if shape.normed_heads:
        both = shape.attention + shape.key_value
        layer += norm * both + FLOAT * shape.heads * both / shape.attention
    one = size.tokens * layer + size.keys * w * 2 * shape.key_value
    # The last norm, whose result is kept for completions only, and the rotation's angles.
    outside = size.tokens * (norm * h + FLOAT + w * 2 * shape.attention / shape.heads) + size.completions * w * h
    # In an MLP: gradients of the product, of both factors, and of what is around it; the product itself is gone. In 4
    # bits, the weights of one projection at a time.
    gradients = size.tokens * w * (2 * shape.widest + 2 * h)
    gradients += w * h * max(shape.attention, shape.widest) * config.model.load_in_4bit
    again = config.train.gradient_checkpointing  # then a layer keeps its input, until it is computed again
    return Activations(
        layers=shape.layers * (size.tokens * w * h if again else one),
        outside=outside,
        in_norm=size.tokens * 5 * FLOAT * h,  # gradients and powers of its input
        in_layer=gradients + one * again,
    )


def _inputs(config: RunConfig, shape: ModelShape) -> float:
    """Bytes per token and layer of what the projections keep of their inputs, each for its weight's gradient or for an
    adapter's. Attention's output, which it keeps itself, is not among them."""
    w, model = width(config), config.model
    everything = w * (2 * shape.hidden + shape.widest)
    if not model.use_peft:
        return everything
    adapted = adapted_inputs(shape, config)
    between = w * model.lora_r * len(adapted)  # the two matrices of an adapter
    if model.lora_dropout:  # each adapter has its own input with zeros, and a mask of a byte per element
        return between + (w + 1) * sum(adapted.values())
    if shape.experts.layers:
        return between + everything
    return between + w * sum({SAME_INPUT[name]: size for name, size in adapted.items() if name != "o_proj"}.values())
