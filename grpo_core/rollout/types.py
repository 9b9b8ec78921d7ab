"""Requests to an engine, its answers, and the rollouts that training reads."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
from torch import Tensor, nn


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn, and where a completion ends; temperature 0 is greedy.

    A text of `stop` ends a completion with the token that completes it, which stays in the completion's tokens.
    """

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()

    @property
    def is_truncated(self) -> bool:
        """True if some tokens cannot be drawn."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


@dataclass(frozen=True)
class Request:
    """`num_completions` of one prompt; completion i is drawn with `seed + i`, whatever else is in the batch.
    `max_tokens`: a lower limit than the sampling's; None: the sampling's. `conversation`: the same number for all turns
    of a conversation, so that an engine with several caches samples them where the earlier turns are cached. `row`: the
    prompt's dataset row."""

    prompt_ids: list[int]
    num_completions: int
    seed: int
    max_tokens: int | None = None
    conversation: int | None = None
    row: int = 0


def token_limit(request: Request, sampling: Sampling) -> int:
    """Largest number of tokens of each of the request's completions. Raises ValueError if that is 0: engines sample one
    at least, and a turn for which none is left is not asked for."""
    limit = sampling.max_tokens if request.max_tokens is None else request.max_tokens
    if limit < 1:
        raise ValueError(f"a request for {limit} tokens: engines sample one at least; end the conversation instead")
    return limit


@dataclass(frozen=True)
class Completion:
    """Sampled tokens (the end token included), each token's log-probability, and whether the length limit cut it.

    A log-probability is at the sampling temperature (at 1 where sampling is greedy), after the repetition penalty and
    over the tokens that min-p, top-k and top-p leave. `mask`: of a conversation, 1 per token
    that the policy sampled and 0 per token of the environment, whose log-probability is given as 0; None: the policy
    sampled all of them. `ages`: hand-overs of weights since the token was sampled; None: 0 for all of them.
    `versions`: the weights that sampled the token, counted by hand-overs; None: the engine does not say. `routes`: the
    experts that a mixture took for each token of prompt and completion, (tokens, L · K) int16, see `routing.choices`;
    any for the last token, which nothing reads. None: the engine does not say.
    """

    ids: list[int]
    logprobs: list[float]
    truncated: bool
    mask: list[int] | None = None
    ages: list[int] | None = None
    versions: list[int] | None = None
    routes: np.ndarray | None = None

    @property
    def sampled_tokens(self) -> int:
        return len(self.ids) if self.mask is None else sum(self.mask)


Finished = tuple[int, list[Completion]]  # a request, by its index among the requests, and all of its completions
Stream = Generator[list[Finished], Sequence[Request] | None, None]


class Sampler(Protocol):
    """Source of completions."""

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Stream:
        """Yield after each step the requests that it finished, often none; may be closed early. More requests may be
        sent in, and their numbers continue; it ends when all are finished and none is sent."""
        ...


class Engine(Sampler, Protocol):
    """Samples from the policy: with its weights as of the last `sync_weights`, or, in the same memory, as they are.

    `notes`: a sentence with its reason for each thing that it does in a slower or other way than it could.
    """

    notes: list[str]

    def compute_logprobs(self, sequences: Sequence[list[int]]) -> list[list[float]]:
        """Log-probability of each token except the first, given those before it, at temperature 1. One row per
        sequence; an engine with several copies of the weights gives all rows of each copy, one copy after the other."""
        ...

    def sync_weights(self, model: nn.Module) -> str:
        """Take over the model's weights; returns how: "shared" (the same memory), "copied", "reloaded" (by the engine's
        own loader), "adapter" (only the LoRA adapter), or "sent by" a transfer to servers."""
        ...

    def close(self) -> None:
        """Give back what the engine holds, before the process group goes."""
        ...


@runtime_checkable
class Lookahead(Protocol):
    """An engine, or conversations with one, that sample while the training trains, and go on with other weights when
    they come."""

    def begin(self, requests: Sequence[Request], sampling: Sampling, max_staleness: int) -> None:
        """Start those that are not begun; each must be taken at most `max_staleness` hand-overs of weights later."""
        ...

    def take(
        self, requests: Sequence[Request], sampling: Sampling, count: int
    ) -> Generator[list[tuple[int, list[Any]]], None, None]:
        """Yield the completions, or conversations, of `count` of these requests, all of them begun: those that have to
        be taken now, then those that finish first, older ones before others. Sampling of the rest goes on."""
        ...

    def drop_begun(self) -> None:
        """Cancel everything that was begun and not yet asked for."""
        ...


class AheadSampler(Protocol):
    """An engine that gives the turns of conversations that are sampled ahead. `version`: of its weights, counted by
    hand-overs."""

    version: int

    def generate_ahead(self, requests: Sequence[Request], sampling: Sampling) -> Stream:
        """Do as `generate`, with lower priority than what the training waits for, and with versions of the weights."""
        ...


@dataclass(frozen=True)
class GenerationBatch:
    """B completions, sampled and scored: the same on every process, groups in a row, right-padded to T tokens."""

    index: int
    scheduled_rows: list[int]  # P, the dataset rows whose turn it is
    prompt_ids: list[list[int]]  # B, a prompt and what its environment added; may differ within a group
    completion_ids: Tensor  # (B, T) int64
    completion_mask: Tensor  # (B, T) float32, 1 on the tokens that are trained
    completion_lengths: Tensor  # (B,) int64, the end token included
    truncated: Tensor  # (B,) bool
    sampling_logprobs: Tensor  # (B, T) the engine's
    advantages: Tensor  # (B,)
    sampled_completions: int  # B, plus those of groups that were replaced
    sampled_tokens: int  # tokens of the sampled completions
    sampled_rows: Tensor  # (Q,) int64, dataset rows of the sampled completions
    passed: Tensor  # (Q,) float64, how far these passed: 0 to 1, NaN if not scored
    metrics: dict[str, float]  # rewards, lengths, seconds
    routes: Tensor | None = field(default=None, kw_only=True)  # (B, prompt + completion, F) int16, see Completion


@dataclass(frozen=True)
class Rollout(GenerationBatch):
    """A generation batch with the trainer's log-probabilities: what updates read."""

    old_logprobs: Tensor | None  # (B, T) before the first update; None if every update is on-policy
    ref_logprobs: Tensor | None  # (B, T) of the reference policy; None without KL
    keep: Tensor | None  # (B, T) 1 on the tokens of highest entropy; None keeps all
    teacher_logprobs: Tensor | None = field(default=None, kw_only=True)  # (B, T)
    # (B,) n where the nth of the teachers teaches, 0 where none does; None: the first everywhere.
    taught: Tensor | None = field(default=None, kw_only=True)
    # (B,) the prompts behind which a teacher's distributions are read in each update; None: those of the policy.
    shown: list[list[int]] | None = field(default=None, kw_only=True)
