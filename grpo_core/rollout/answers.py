"""Answers of an engine, or of conversations with it, to requests, before they are scored."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass

from grpo_core.data.prompts import Prompts
from grpo_core.environments.conversation import Conversation
from grpo_core.environments.setting import Setting
from grpo_core.rollout.ahead import TakingSampler
from grpo_core.rollout.conversations import play
from grpo_core.rollout.types import Completion, Request, Sampler, Sampling, token_limit


@dataclass(frozen=True)
class Answer:
    """A completion that is not scored yet; `place`: its index among those of all requests."""

    place: int
    row: int
    prompt_ids: list[int]
    completion: Completion
    conversation: Conversation | None = None

    @property
    def has_failed(self) -> bool:
        """True for a conversation whose environment could not go on."""
        return self.conversation is not None and bool(self.conversation.said.failure)


Answers = Generator[list[Answer], None, None]


def completions_of(engine: Sampler, requests: Sequence[Request], sampling: Sampling) -> Answers:
    """Yield completions of one turn."""
    first = _places(requests)
    for finished in engine.generate(requests, sampling):
        yield [
            Answer(first[number] + member, requests[number].row, requests[number].prompt_ids, completion)
            for number, completions in finished
            for member, completion in enumerate(completions)
        ]


def conversations_of(
    engine: Sampler, requests: Sequence[Request], sampling: Sampling, prompts: Prompts, setting: Setting
) -> Answers:
    """Yield conversations with tools or environments; each member of a request's group has its own."""
    rows = [request.row for request in requests for _ in range(request.num_completions)]
    if isinstance(engine, TakingSampler):
        first = _places(requests)
        ended: Iterable[list[tuple[int, Conversation]]] = (
            [(first[number] + member, talk) for number, talks in found for member, talk in enumerate(talks)]
            for found in engine.generate(requests, sampling)
        )
    else:
        seeds = [request.seed + i for request in requests for i in range(request.num_completions)]
        limits = [token_limit(request, sampling) for request in requests for _ in range(request.num_completions)]
        plays = [setting.converse(prompts.rows[row], row, limit) for row, limit in zip(rows, limits, strict=True)]
        ended = play(engine, plays, seeds, sampling)
    for talks in ended:
        yield [
            Answer(place, rows[place], talk.prompt_ids or prompts.ids[rows[place]], _completion(talk), talk)
            for place, talk in talks
        ]


def _places(requests: Sequence[Request]) -> list[int]:
    """Index of each request's first completion among those of all requests."""
    return [0, *itertools.accumulate(request.num_completions for request in requests)]


def _completion(talk: Conversation) -> Completion:
    """Return the conversation's tokens, or a token that is not trained if it has none, since its environment failed."""
    if not talk.ids:
        return Completion([0], [0.0], truncated=False, mask=[0], ages=None if talk.ages is None else [0])
    return Completion(talk.ids, talk.logprobs, talk.truncated, talk.mask, talk.ages)
