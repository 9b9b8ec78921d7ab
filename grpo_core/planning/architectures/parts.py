"""What a layer is made of: attention, a recurrence, an MLP, experts. Sizes are numbers, not bytes."""

from __future__ import annotations

from dataclasses import dataclass


class ForecastError(ValueError):
    """A quantity that cannot be forecast; the message says why."""


@dataclass(frozen=True)
class Linear:
    """A linear layer, or one of each expert."""

    inputs: int
    outputs: int
    source: str = ""  # those of a layer with one source keep one input; "": what its part keeps in any case
    names: tuple[str, ...] = ()  # by which LoRA adapts it, with a rank for each; none: it does not
    copies: int = 1  # one per expert
    taken: int = 1  # of these, by a token


@dataclass(frozen=True)
class Part:
    """A part of a layer. What it keeps between its forward and its backward pass is per token, and what autograd saves
    of transformers' own code, in which a recurrence goes through chunks of tokens in Python."""

    linear: tuple[Linear, ...] = ()
    other: int = 0  # parameters beside those
    idle: int = 0  # of them, those of experts that a token does not take
    norms: tuple[tuple[int, int], ...] = ()  # numbers that each norm takes, and statistics that it keeps
    half: float = 0  # kept in the precision of the pass, beside inputs of linear layers
    single: float = 0  # kept in float32
    keys: int = 0  # kept per key
    scored: int = 0  # products of queries with a key, and of its weight with the value, per token that attends to it
    score_bytes: int = 0  # kept per token and key, where attention is not fused
    widest: float = 0  # that a token passes, in an MLP or experts
    recurred: float = 0  # float32 gradients in a recurrence's backward pass
    chunk: int = 0  # tokens, to which a recurrence fills up each sequence, laid in a row of its own; 0: it is none
    window: int | None = None  # tokens that attention sees
    cached: int = 0  # kept per token in sampling
    convolved: int = 0  # kept per sequence in sampling
    state: int = 0  # the same in float32

    @property
    def parameters(self) -> int:
        return self.other + sum(it.inputs * it.outputs * it.copies for it in self.linear)

    @property
    def active(self) -> int:
        """Parameters that a token passes."""
        return self.other - self.idle + sum(it.inputs * it.outputs * it.taken for it in self.linear)
