"""Conversations played with an engine, or ahead of the training: each goes on when its environment has answered, while
others are sampled."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

from grpo_core.data.order import derive_seed
from grpo_core.data.prompts import Prompts
from grpo_core.environments.conversation import Conversation, Play, Question, Turn
from grpo_core.environments.processes import CallError, wait_for_any
from grpo_core.environments.setting import Setting
from grpo_core.planning.sampling_ahead import choose_groups
from grpo_core.rollout.types import AheadSampler, Completion, Request, Sampler, Sampling, Stream, token_limit

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
                    go_on(which, completion)
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


@dataclass(frozen=True)
class _AheadTurns:
    """Sampler of turns that are sampled ahead."""

    engine: AheadSampler

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Stream:
        return self.engine.generate_ahead(requests, sampling)


@dataclass
class _Group:
    """`due`: latest version of the weights at which it is taken; `members`: conversations that have ended."""

    due: int
    size: int
    members: dict[int, Conversation] = field(default_factory=dict)


class ConversationsAhead:
    """A Lookahead over the conversations of a process.

    They go on while a generation batch is taken. In between, turns are sampled and tools work, but a conversation does
    not begin its next turn; that time does not count against its tools.
    """

    def __init__(self, engine: AheadSampler, setting: Setting, prompts: Prompts):
        self.engine, self.setting, self.prompts = engine, setting, prompts
        self.begun: dict[int, _Group] = {}  # by the request's seed
        self.finished: list[int] = []  # of these, those with all members, in the order of their ends
        self.playing: Playing | None = None
        self.places: list[tuple[int, int]] = []  # per conversation in `playing`: its group, and number there

    def begin(self, requests: Sequence[Request], sampling: Sampling, max_staleness: int) -> None:
        new: list[tuple[Play, int]] = []
        for request in requests:
            if request.seed in self.begun:
                continue
            self.begun[request.seed] = _Group(self.engine.version + max_staleness, request.num_completions)
            for number in range(request.num_completions):
                limit = token_limit(request, sampling)
                talk = self.setting.converse(self.prompts.rows[request.row], request.row, limit)
                new.append((talk, request.seed + number))
                self.places.append((request.seed, number))
        self._go_on(sampling, new)

    def take(
        self, requests: Sequence[Request], sampling: Sampling, count: int
    ) -> Generator[list[tuple[int, list[Conversation]]], None, None]:
        numbers = {request.seed: number for number, request in enumerate(requests)}
        room = count
        while room:
            due = {seed: self.begun[seed].due for seed in numbers if seed in self.begun}
            taken = choose_groups(self.finished, due, self.engine.version, room, count)
            if not taken:
                self._go_on(sampling)
            room -= len(taken)
            yield [(numbers[seed], self._pop(seed)) for seed in taken]

    def drop_begun(self) -> None:
        if self.playing is not None:
            self.playing.close()
        for group in self.begun.values():
            self.setting.environments.free(talk.environment for talk in group.members.values())
        self.begun, self.finished, self.playing, self.places = {}, [], None, []

    def _go_on(self, sampling: Sampling, new: Sequence[tuple[Play, int]] = ()) -> None:
        """Play one step of the conversations, with the new ones."""
        ended: Ended = []
        if self.playing is not None:
            try:
                ended = self.playing.send(new or None)
            except StopIteration:
                self.playing = None
        elif new:
            plays, seeds = zip(*new, strict=True)
            self.playing, self.places = play(_AheadTurns(self.engine), plays, seeds, sampling), self.places[-len(new) :]
            ended = next(self.playing)
        for place, talk in ended:
            seed, number = self.places[place]
            group = self.begun[seed]
            group.members[number] = talk
            if len(group.members) == group.size:
                self.finished.append(seed)

    def _pop(self, seed: int) -> list[Conversation]:
        """Remove the group and return its conversations, each token with its current age."""
        self.finished.remove(seed)
        members = self.begun.pop(seed).members
        for talk in members.values():
            talk.ages = [self.engine.version - version for version in talk.versions]
        return [members[number] for number in sorted(members)]
