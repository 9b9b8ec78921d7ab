"""Layers that carry a state from token to token, in packed batches: a convolution or recurrence would run from one
sequence into the next, so each completion goes through them in a row of its own, behind its prompt. All other parts of
the decoder still see each token once. The prompt's state is computed once per completion."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer


@dataclass(frozen=True)
class Rows:
    """Where the N tokens of a packed batch are in R rows of at most L tokens."""

    tokens: Tensor  # (R, L) token among the N at each place; any where a row has ended
    places: Tensor  # (N,) place among the R · L of each token; a prompt's are in the first of its rows


def lay_in_rows(prompts: Tensor, completions: Tensor, prompt_of: Tensor, size: int) -> Rows:
    """Rows for U prompts and R completions of these lengths, as inputs, packed as prompts and then completions; `size`:
    tokens of the batch, with padding behind them. (U,), (R,), (R,)"""
    starts = (lengths := torch.cat([prompts, completions])).cumsum(0) - lengths
    first, own = starts[: len(prompts)][prompt_of, None], starts[len(prompts) :, None]
    shared, width = prompts[prompt_of, None], int((prompts[prompt_of] + completions).max())
    column = torch.arange(width)[None]
    tokens = torch.where(column < shared, first + column, own + column - shared)
    inside = column < shared + completions[:, None]
    tokens = torch.where(inside, tokens, 0)
    places = torch.zeros(size, dtype=torch.int64)
    # Prompts are numbered as they first appear. No place is written twice: which value stays would be open.
    is_first = torch.diff(prompt_of.cummax(0).values, prepend=torch.tensor([-1])) > 0
    rows, columns = (inside & (is_first[:, None] | (column >= shared))).nonzero(as_tuple=True)
    places[tokens[rows, columns]] = rows * width + columns
    return Rows(tokens, places)


def use_rows(decoder: nn.Module) -> None:
    """Let the layers of a decoder that carry a state take packed batches too. Not undone: recomputed layers need it
    again."""
    for layer in decoder.modules():
        taken = getattr(layer.forward, "func", None) is _forward
        if isinstance(layer, GradientCheckpointingLayer) and not taken and (mixers := _mixers(layer)):
            layer.forward = partial(_forward, mixers, layer.forward)


def takes_rows(decoder: nn.Module) -> bool:
    """True if a layer has a part that `use_rows` gives its own rows."""
    return any(_mixers(module) for module in decoder.modules() if isinstance(module, GradientCheckpointingLayer))


def _mixers(layer: nn.Module) -> list[nn.Module]:
    """Parts of a layer with a convolution over tokens, which come with a recurrence or are all there is."""
    return [part for part in layer.modules() if any(isinstance(each, nn.Conv1d) for each in part.children())]


def _forward(mixers: list[Any], own: Callable[..., Any], *arguments: Any, rows: Rows | None = None, **keys: Any) -> Any:
    """A layer's forward pass, in which its mixers see rows."""
    if rows is None:
        return own(*arguments, **keys)
    before = [vars(mixer).get("forward") for mixer in mixers]
    for mixer in mixers:
        mixer.forward = partial(_by_rows, rows, mixer.forward)
    try:
        return own(*arguments, **keys)
    finally:
        for mixer, forward in zip(mixers, before, strict=True):
            del mixer.forward
            if forward is not None:
                mixer.forward = forward


def _by_rows(rows: Rows, own: Callable[..., Any], hidden_states: Tensor, *arguments: Any, **keys: Any) -> Any:
    """(1, N, h) → (1, N, h). A mixer's further arguments are a cache and a mask, of which a packed batch has none."""
    repeated = Repeat.apply(hidden_states[0], rows.tokens.flatten()).unflatten(0, rows.tokens.shape)
    return own(repeated, *arguments, **keys).flatten(0, 1).index_select(0, rows.places)[None]


class Gather(torch.autograd.Function):
    """Take rows at distinct places; the backward pass writes their gradients there, without adding."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        ctx.size = len(x)
        return x.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (places,) = ctx.saved_tensors
        return gradient.new_zeros(ctx.size, *gradient.shape[1:]).index_copy_(0, places, gradient), None


class Repeat(Gather):
    """Take rows at places that may repeat; the gradients of each row add up in float32."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (places,) = ctx.saved_tensors
        added = gradient.new_zeros(ctx.size, *gradient.shape[1:], dtype=torch.float32)
        return added.index_add_(0, places, gradient.float()).to(gradient.dtype), None
