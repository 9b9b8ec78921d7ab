"""Record of this process's phase and of its last progress, in a file for those who watch the training.

The main thread says what it does: `phase`, `moved` within a long one, `waiting` for other processes. The record of
process N, RANKS/N.json in the training's output, is written in place, so that readers on other machines see it too. It
holds for how long the process may stand still: longer than it ever did so far, and than its time limits. A process that
not called `start` writes nothing.

On DUMP_SIGNAL, a process appends the Python stacks of all its threads to RANKS/N.stacks. The handler is written in C:
it needs neither the GIL nor the main thread.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

RANKS = "ranks"  # folder of the records, in the output of a training
MACHINES = "GRPO_MACHINES"  # variable with the machines' names, as JSON; unset on a single machine
DUMP_SIGNAL = signal.SIGUSR2
FLOOR_SECONDS = 600.0  # until `expect` gives another one
FIRST = 6.0  # times the floor, for the first pass through a phase: it may download, compile or start something
PACE = 10.0  # times the longest time that this process has stood still in a phase
WRITE_SECONDS = 1.0  # between two records, as long as the phase is the same
SET_UP, LOOP, CHECKPOINT, REWARDS = "set-up", "loop", "checkpoint", "rewards"
AROUND = (SET_UP, LOOP)  # phases that are named only outside of others
SIZE = 1024  # bytes of a record; a write of this size is not torn


@dataclass(frozen=True)
class Record:
    """One process's record of its progress."""

    rank: int
    ranks: int
    """Number of processes of the training."""
    machine: str
    """The machine's name in `launch.hosts` or its like; "" on a single machine."""
    host: str
    """The machine's own name, where `pid` is one of its processes."""
    pid: int
    phase: str
    reward: str
    """The reward functions that are running; "" outside of rewards."""
    waits: bool
    """True if it waits for other processes."""
    since: float
    """Time at which the phase began, in seconds since 1970."""
    moves: int
    """A number that grows with each sign of progress."""
    moved: float
    """Time at which that number last grew, in seconds since 1970."""
    limit: float
    """Seconds without progress after which it counts as hanging."""

    @property
    def name(self) -> str:
        """Such as "rank 1 (gpu-2)"."""
        return f"rank {self.rank}" + (f" ({self.machine})" if self.machine else "")

    @property
    def is_here(self) -> bool:
        """True if `pid` is a process of this machine."""
        return self.host == socket.gethostname()

    @property
    def doing(self) -> str:
        """The phase, with the rewards that are running."""
        return self.phase + (f" ({self.reward})" if self.reward else "")


def read_records(folder: Path) -> list[Record]:
    """The records in a folder RANKS, by rank. One that is being written for the first time is left out."""
    found = []
    for path in folder.glob("*.json"):
        with suppress(OSError, ValueError, TypeError):
            found.append(Record(**json.loads(path.read_text().rstrip("\0 \n"))))
    return sorted(found, key=lambda record: record.rank)


def rank_name(rank: int) -> str:
    """Name of a process of this training, such as "rank 1 (gpu-2)"."""
    names = json.loads(os.environ.get(MACHINES, "[]"))
    return f"rank {rank}" + (f" ({names[rank // int(os.environ['LOCAL_WORLD_SIZE'])]})" if names else "")


class _Progress:
    """The state of this process; changed by the main thread, and by the thread that writes checkpoints."""

    def __init__(self, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        self.rank, self.ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        names = json.loads(os.environ.get(MACHINES, "[]"))
        machine = names[int(os.environ.get("GROUP_RANK", "0"))] if names else ""
        self.identity = {
            "rank": self.rank,
            "ranks": self.ranks,
            "machine": machine,
            "host": socket.gethostname(),
            "pid": os.getpid(),
        }
        self.stacks = (folder / f"{self.rank}.stacks").open("a")
        faulthandler.register(DUMP_SIGNAL, self.stacks, all_threads=True)
        self.file = os.open(folder / f"{self.rank}.json", os.O_WRONLY | os.O_CREAT, 0o666)
        self.floor, self.at_least = FLOOR_SECONDS, dict[str, float]()
        self.phases: list[tuple[str, str, float]] = [(SET_UP, "", time.time())]
        self.waits: dict[bool, int] = {True: 0, False: 0}  # of the main thread, and of another one
        self.moves, self.last, self.written = 0, time.monotonic(), 0.0
        self.longest: defaultdict[str, float] = defaultdict(float)  # seconds between two moves, by phase
        self.work: defaultdict[str, float] = defaultdict(float)  # seconds without those of waiting, by phase
        self.passed = {LOOP}  # phases that have ended once, and the one that never does
        self.write()

    @property
    def phase(self) -> str:
        names = [name for name, _, _ in self.phases]
        return "/".join(name for name in names if name not in AROUND) or names[-1]

    @property
    def is_waiting(self) -> bool:
        """True if this process waits for others; also if the main thread waits for the one that writes a checkpoint,
        and that one waits for others."""
        return bool(self.waits[True] or (self.phases[-1][0] == CHECKPOINT and self.waits[False]))

    def move(self) -> None:
        now = time.monotonic()
        if not self.waits[True]:
            self.longest[self.phase] = max(self.longest[self.phase], now - self.last)
            self.work[self.phases[-1][0]] += now - self.last
        self.last, self.moves = now, self.moves + 1

    def limit(self) -> float:
        name, path = self.phases[-1][0], self.phase
        first = 1.0 if path in self.passed else FIRST
        return max(first * self.floor, self.at_least.get(name, 0.0), PACE * self.longest[path])

    def write(self) -> None:
        _, reward, since = self.phases[-1]
        record = {
            **self.identity,
            "phase": self.phase,
            "reward": reward[:200],
            "waits": self.is_waiting,
            "since": since,
            "moves": self.moves,
            "moved": time.time(),
            "limit": self.limit(),
        }
        self.written = self.last
        with suppress(OSError):  # other code reports a full disk
            os.pwrite(self.file, json.dumps(record).encode().ljust(SIZE), 0)


_here: _Progress | None = None


def start(folder: Path) -> None:
    """Write this process's record into the folder from now on. Its first phase is the set-up."""
    global _here
    _here = _Progress(folder)


def expect(floor: float, at_least: Mapping[str, float]) -> None:
    """Allow `floor` seconds without progress, or as many as `at_least` has for a phase's name if they are more."""
    if _here is not None:
        _here.floor, _here.at_least = floor, dict(at_least)
        _here.move()
        _here.write()


@contextmanager
def phase(name: str, reward: str = "") -> Iterator[None]:
    """Mark the block, or the function that this decorates, as a phase of the work, within the phase around it if that
    is another one."""
    here = _here
    if here is None or not _in_main_thread() or here.phases[-1][0] == name:
        yield
        return
    depth = len(here.phases)
    here.move()
    here.phases.append((name, reward, time.time()))
    here.write()
    try:
        yield
        here.passed.add(here.phase)
    finally:
        here.move()
        del here.phases[depth:]
        here.write()


def moved() -> None:
    """Record a sign of progress."""
    if _here is not None:
        _here.move()
        if _here.last > _here.written + WRITE_SECONDS:
            _here.write()


@contextmanager
def waiting() -> Iterator[None]:
    """Mark the block, or the function that this decorates, as waiting for other processes."""
    here, main = _here, _in_main_thread()
    if here is None or here.ranks == 1:
        yield
        return
    here.move()
    here.waits[main] += 1
    here.write()
    try:
        yield
    finally:
        here.move()
        here.waits[main] -= 1
        here.write()


def seconds_of_work() -> dict[str, float]:
    """Seconds that this process has worked in each phase since the last call, without those of waiting for others."""
    if _here is None:
        return {}
    _here.move()
    work = dict(_here.work)
    _here.work.clear()
    return work


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
