"""Conversations that are sampled ahead of the training."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

from grpo_core.data.prompts import Prompts
from grpo_core.environments.conversation import Conversation, Play
from grpo_core.environments.setting import Setting
from grpo_core.planning.sampling_ahead import choose_groups
from grpo_core.rollout.conversations import Ended, Playing, play
from grpo_core.rollout.types import AheadSampler, Request, Sampling, Stream, token_limit


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
