"""Conversations played with an engine: each goes on when its environment has answered, while others are sampled."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence

from grpo_core.data.order import derive_seed
from grpo_core.environments.conversation import Conversation, Play, Question, Sampled, Turn
from grpo_core.environments.processes import CallError, wait_for_any
from grpo_core.rollout.types import Completion, Request, Sampler, Sampling, Stream

SETTLE_SECONDS = 0.02  # to wait for further answers, so that sampling does not begin with one request
LONGEST_PAUSE = 1.0

Ended = list[tuple[int, Conversation]]  # each by its index among the conversations
Playing = Generator[Ended, Sequence[tuple[Play, int]] | None, None]  # more conversations are sent with their seeds


def play(engine: Sampler, plays: Sequence[Play], seeds: Sequence[int], sampling: Sampling) -> Playing:
    """Play all conversations to their ends. Yields, after each step of the engine, those that have ended. More may be
    sent in, and their numbers continue; the generator ends when all have ended and none is sent.

    A conversation's first turn is drawn with its seed, as a single completion is, and turn n with
    derive_seed(seed, n), so its tokens do not depend on what is sampled beside it.
    """
    plays, seeds = [*plays], [*seeds]
    asked: dict[int, Question] = {}  # conversations that wait for their environment
    ready: dict[int, Turn] = {}  # those whose next turn can be sampled
    ended: Ended = []

    def go_on(which: int, value: object = None) -> None:
        try:
            step = plays[which].throw(value) if isinstance(value, CallError) else plays[which].send(value)
        except StopIteration as end:
            ended.append((which, end.value))
            return
        if isinstance(step, Turn):
            ready[which] = step
        else:
            step.environment.ask(step.request, step.seconds)
            asked[which] = step

    stream = _Stream(engine, sampling)
    try:
        for which in range(len(plays)):
            go_on(which)
        while asked or ready or stream.sampled or ended:
            before = time.monotonic()
            more = (yield ended) or ()
            for question in asked.values():
                question.environment.pause(time.monotonic() - before)
            ended = []
            for which, (each, seed) in enumerate(more, len(plays)):
                plays.append(each)
                seeds.append(seed)
                go_on(which)
            if asked and not stream.sampled:
                wait_for_any(
                    [each.environment for each in asked.values()],
                    _seconds_to_wait(asked, SETTLE_SECONDS if ready else LONGEST_PAUSE),
                )
            heard = _take_answers(asked)
            for which, answer in heard:
                go_on(which, answer)
            if heard and asked and not stream.sampled:
                continue  # others may be about to answer
            if ready or stream.sampled:
                new = [(which, _request(turn, seeds[which])) for which, turn in ready.items()]
                ready.clear()
                for which, completion in stream.step(new):
                    go_on(
                        which,
                        Sampled(completion.ids, completion.logprobs, completion.truncated, completion.versions or ()),
                    )
    finally:
        stream.close()
        for each in plays:
            each.close()


class _Stream:
    """Sampling that requests may join at any time."""

    def __init__(self, engine: Sampler, sampling: Sampling):
        self.engine, self.sampling = engine, sampling
        self.running: Stream | None = None
        self.places: list[int] = []  # of the requests that `running` has been given
        self.sampled: set[int] = set()  # places whose requests are not finished

    def step(self, new: Sequence[tuple[int, Request]]) -> list[tuple[int, Completion]]:
        """Hand in requests, each for a place. Returns the completions that one step of the engine finishes."""
        requests = [request for _, request in new]
        self.sampled |= {place for place, _ in new}
        if self.running is None:
            self.running, self.places = self.engine.generate(requests, self.sampling), []
            requests = []
        self.places += [place for place, _ in new]
        try:
            finished = self.running.send(requests or None)
        except StopIteration:
            finished, self.running = [], None
        found = [(self.places[number], completion) for number, (completion,) in finished]
        self.sampled -= {place for place, _ in found}
        return found

    def close(self) -> None:
        if self.running:
            self.running.close()


def _take_answers(asked: dict[int, Question]) -> list[tuple[int, object]]:
    """Return the answers, or errors, that have arrived, and take their questions out of `asked`."""
    heard: list[tuple[int, object]] = []
    for which, question in asked.items():
        try:
            answer: object = question.environment.answer()
        except CallError as error:
            answer = error
        if answer is not None:
            heard.append((which, answer))
    for which, _ in heard:
        del asked[which]
    return heard


def _seconds_to_wait(asked: dict[int, Question], most: float) -> float:
    """Seconds until the deadline of the first of the questions, but at most `most`."""
    nearest = min(question.environment.deadline for question in asked.values())
    return max(0.0, min(most, nearest - time.monotonic()))


def _request(turn: Turn, seed: int) -> Request:
    return Request(turn.ids, 1, derive_seed(seed, turn.number) if turn.number else seed, turn.max_tokens, seed)
