"""Sampling ahead of the training: which groups a generation batch takes, and how fast that is, simulated.

Engines and the simulation choose groups by `choose_groups`. The simulation goes event by event: a step of a server
gives each of its sequences a token, and takes longer for more sequences; a group is finished with its last completion.
Imports no torch.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

Turn = tuple[int, float]  # tokens that are sampled, and the seconds that a tool takes after them
Group = Sequence[Sequence[Turn]]  # the turns of each completion of one prompt; without tools one turn each


def batches_ahead(max_staleness: int) -> int:
    """Generation batches that are begun before their turn: half of those that the staleness allows, so that groups that
    take long have the other half."""
    return (max_staleness + 1) // 2


def choose_groups(finished: Iterable[int], due: Mapping[int, int], version: int, room: int, count: int) -> list[int]:
    """Choose the finished groups that a generation batch with room for `room` more takes now: in the order given,
    unless a group that is left would get too old. Groups that must be taken within the next n batches may number at
    most n · count, beside the room that is left in this one. `due`: for each group that is not taken, the number of
    weight hand-overs after which it is taken at the latest; `version`: hand-overs so far; `count`: groups per batch."""
    later = {group: max(last - version, 0) for group, last in due.items()}
    left = Counter(later.values())
    chosen: list[int] = []
    for group in finished:
        if len(chosen) == room:
            break
        left[later[group]] -= 1
        sums = itertools.accumulate(left[batches] for batches in range(max(left) + 1))
        rooms = itertools.count(room - len(chosen) - 1, count)
        if later[group] == min(left) or all(number <= limit for number, limit in zip(sums, rooms, strict=False)):
            chosen.append(group)
            left = +left
        else:
            left[later[group]] += 1
    return chosen


@dataclass(frozen=True)
class Speed:
    """Seconds that the parts of a training take."""

    step: float  # of a server's decoding step, whatever the number of sequences
    sequence: float = 0.0  # more, per sequence in it
    prefill: float = 0.0  # per token of a prompt, and per token that is sampled already when new weights come
    hand_over: float = 0.0  # of weights, while the servers stand still
    update: float = 0.0  # of training, per generation batch
    token: float = 0.0  # more, per completion token in it


@dataclass(frozen=True)
class Simulated:
    """A training as simulated. `batches`: of each generation batch, the groups and the hand-overs since each began."""

    seconds: float
    waited: float  # seconds in which the trainer waits for completions
    mean_staleness: float  # hand-overs since a token was sampled, mean over the tokens
    batches: list[list[tuple[int, int]]]

    @property
    def batches_per_hour(self) -> float:
        return 3600 * len(self.batches) / self.seconds

    @property
    def waiting_share(self) -> float:
        return self.waited / self.seconds

    @property
    def max_staleness(self) -> int:
        return max(age for batch in self.batches for _, age in batch)


def simulate(
    groups: Sequence[Group],
    prompts_per_generation: int,
    max_staleness: int,
    servers: int,
    slots: int,
    speed: Speed,
    prompt_tokens: float = 0.0,
) -> Simulated:
    """Train on all groups, P per generation batch, in their order. `slots`: sequences that a server samples together.

    A group is sampled by the server that has the fewest groups. Several training processes count as one, which takes
    the groups that are finished first among all of theirs.
    """
    sampling = _Sampling(groups, servers, slots, speed, prompt_tokens)
    begun: dict[int, int] = {}
    batches: list[list[tuple[int, int]]] = []
    waited, ahead = 0.0, batches_ahead(max_staleness)
    for index in range(math.ceil(len(groups) / prompts_per_generation)):
        sampling.hand_over()
        version = index + 1
        first = (index + ahead) * prompts_per_generation if index else 0
        for group in range(first, min((version + ahead) * prompts_per_generation, len(groups))):
            begun[group] = version
            sampling.begin(group)
        batch: list[tuple[int, int]] = []
        room = min(prompts_per_generation, len(begun))
        start = sampling.now
        while room:
            finished = [group for group in sampling.finished if group in begun]
            due = {group: then + max_staleness for group, then in begun.items()}
            taken = choose_groups(finished, due, version, room, prompts_per_generation)
            batch += [(group, version - begun.pop(group)) for group in taken]
            room -= len(taken)
            if room:
                sampling.next_event()
        waited += sampling.now - start
        for group, _ in batch:
            sampling.take(group)
        tokens = sum(tokens for group, _ in batch for completion in groups[group] for tokens, _ in completion)
        sampling.advance(sampling.now + speed.update + speed.token * tokens)
        batches.append(batch)
    return Simulated(sampling.now, waited, sampling.aged / max(sampling.tokens, 1), batches)


@dataclass
class _Completion:
    group: int
    turns: Sequence[Turn]
    server: _Server
    turn: int = 0
    before: int = 0  # tokens of earlier turns
    start: float | None = None  # the server's step at which the turn began; None while it is not being sampled

    @property
    def tokens(self) -> float:
        """Tokens sampled so far."""
        return self.before + (self.server.steps - self.start if self.start is not None else 0.0)


@dataclass
class _Server:
    speed: Speed
    slots: int
    now: float = 0.0
    steps: float = 0.0
    debt: float = 0.0  # seconds of prefilling before the next step
    groups: int = 0
    running: list[tuple[float, int]] = field(default_factory=list)  # (last step of a turn, completion), a heap
    queue: deque[int] = field(default_factory=deque)

    @property
    def step_seconds(self) -> float:
        return self.speed.step + self.speed.sequence * len(self.running)

    @property
    def next_end(self) -> float:
        """Time at which the next turn ends."""
        if not self.running:
            return math.inf
        return self.now + self.debt + max(self.running[0][0] - self.steps, 0.0) * self.step_seconds

    def advance(self, until: float) -> None:
        """Advance to a time before which no turn ends."""
        paid = min(self.debt, until - self.now)
        self.debt -= paid
        if self.running:
            self.steps += (until - self.now - paid) / self.step_seconds
        self.now = until


class _Sampling:
    """The servers' sampling, as time goes on."""

    def __init__(self, groups: Sequence[Group], servers: int, slots: int, speed: Speed, prompt_tokens: float):
        self.groups, self.speed, self.prompt_seconds = groups, speed, prompt_tokens * speed.prefill
        self.servers = [_Server(speed, slots) for _ in range(servers)]
        self.now = 0.0
        self.completions: list[_Completion] = []
        self.waits: list[tuple[float, int]] = []  # (when a tool answers, completion), a heap
        self.left: dict[int, int] = {}  # completions that are not finished, by group
        self.members: dict[int, list[_Completion]] = {}  # of the groups that are not taken
        self.finished: list[int] = []  # groups, in the order in which they were
        self.aged, self.tokens = 0.0, 0  # hand-overs summed over the tokens, and tokens, of what was taken
        self.ages: dict[int, float] = {}

    def begin(self, group: int) -> None:
        server = min(self.servers, key=lambda server: server.groups)
        server.groups += 1
        server.debt += self.prompt_seconds
        self.members[group] = [_Completion(group, turns, server) for turns in self.groups[group]]
        self.left[group], self.ages[group] = len(self.members[group]), 0.0
        for completion in self.members[group]:
            self.completions.append(completion)
            self._ask(len(self.completions) - 1)

    def take(self, group: int) -> None:
        """Count the group's tokens as trained, and forget it."""
        self.aged += self.ages.pop(group)
        self.tokens += sum(completion.before for completion in self.members.pop(group))
        self.finished.remove(group)

    def hand_over(self) -> None:
        """Hand over new weights: sampling stands still, and the tokens sampled so far are prefilled again."""
        for group, completions in self.members.items():
            self.ages[group] += sum(completion.tokens for completion in completions)
            if any(completion.start is not None for completion in completions):
                running = sum(completion.tokens for completion in completions if completion.start is not None)
                completions[0].server.debt += self.prompt_seconds + self.speed.prefill * running
        for server in self.servers:
            server.debt += self.speed.hand_over  # nothing is sampled meanwhile
        self.advance(self.now + self.speed.hand_over)

    def advance(self, until: float) -> None:
        """Advance to a time, with every event before it."""
        while self._next()[0] <= until:
            self.next_event()
        self.now = until
        for server in self.servers:
            server.advance(until)

    def next_event(self) -> None:
        """Advance to the next end of a turn or of a tool's work."""
        self.now, server = self._next()
        for each in self.servers:
            each.advance(self.now)
        if server is None:
            self._ask(heapq.heappop(self.waits)[1])
        else:
            self._end(server)

    def _next(self) -> tuple[float, _Server | None]:
        server = min(self.servers, key=lambda server: server.next_end)
        answer = self.waits[0][0] if self.waits else math.inf
        return (answer, None) if answer < server.next_end else (server.next_end, server)

    def _ask(self, number: int) -> None:
        server = self.completions[number].server
        server.queue.append(number)
        self._fill(server)

    def _fill(self, server: _Server) -> None:
        while server.queue and len(server.running) < server.slots:
            completion = self.completions[number := server.queue.popleft()]
            completion.start = server.steps
            heapq.heappush(server.running, (server.steps + completion.turns[completion.turn][0], number))

    def _end(self, server: _Server) -> None:
        """End the first of the running turns."""
        server.steps, number = heapq.heappop(server.running)
        completion = self.completions[number]
        tokens, wait = completion.turns[completion.turn]
        completion.start, completion.before = None, completion.before + tokens
        completion.turn += 1
        if completion.turn < len(completion.turns):
            heapq.heappush(self.waits, (self.now + wait, number))
        else:
            self.left[completion.group] -= 1
            if not self.left[completion.group]:
                self.finished.append(completion.group)
                server.groups -= 1
        self._fill(server)
