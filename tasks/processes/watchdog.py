"""Notice that a training hangs: which process stands still, and in what.

The stage looks at the processes' records (`grpo_core.system.progress`) and counts for how long each has not moved. Only
time in which it looked counts: while the stage itself is stopped, or its machine sleeps, nothing does. If a process has
stood still for longer than its limit, the stage writes the reason into the file HANG. On each machine, the supervisor
sees that (`tasks.processes.stacks`) and makes its processes write their Python stacks. Then the stage ends all.
"""

from __future__ import annotations

import re
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from grpo_core.system.progress import Record, read_records
from tasks.processes.run import ProcessError
from tasks.processes.stacks import HANG

CHECK_SECONDS = 2.0
STACKS_SECONDS = 15.0  # in which all processes have written their stacks, or do not
LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)')


class HangError(ProcessError):
    """A training that was ended since it hung; the message says what stands still, for how long, in what and where."""


@dataclass
class Stillness:
    """For how long each process has not moved, in seconds of those in which it was looked at."""

    seconds: dict[int, float] = field(default_factory=dict)
    moves: dict[int, tuple[int, int]] = field(default_factory=dict)

    def look(self, records: Sequence[Record], passed: float) -> None:
        """`passed`: seconds since the last look. At most twice the planned ones count: if there were more, this process
        was stopped too. A process that a debugger has stopped counts as moving."""
        for record in records:
            now = (record.pid, record.moves)
            if self.moves.get(record.rank) != now or _state(record) == psutil.STATUS_TRACING_STOP:
                self.seconds[record.rank] = 0.0
            else:
                self.seconds[record.rank] += min(passed, 2 * CHECK_SECONDS)
            self.moves[record.rank] = now

    def hanging(self, records: Sequence[Record]) -> list[Record]:
        """The processes that hang, first the one that is stopped or has stood still longest; none if nothing hangs.

        A process that waits for others does not hang, unless all of them wait: then they are all given. As long as one
        at work is within its limit, nothing hangs: the others may wait for it where their records cannot say so (NCCL).
        """
        blocking = [record for record in records if not record.waits] or records
        all_late = all(self.seconds[record.rank] > record.limit for record in blocking)
        all_there = len(records) == max((record.ranks for record in records), default=0)

        def order(record: Record) -> tuple[bool, float, float]:
            return not _is_stopped(record), -self.seconds[record.rank], record.moved

        return sorted(blocking, key=order) if all_late and all_there else []


@contextmanager
def watchdog(folder: Path, clock: Callable[[], float] = time.monotonic) -> Iterator[Callable[[], None]]:
    """Give a check of the training whose processes have their records in the folder, to be called again and again: it
    looks every CHECK_SECONDS. The records are those of the block: before and after it, there are none.

    The check raises HangError once the stacks are written. It is restartable, except for a reward function that hangs.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _remove_records(folder)
    (folder / HANG).write_text("")
    stillness, looked = Stillness(), clock()

    def check() -> None:
        nonlocal looked
        if (passed := clock() - looked) < CHECK_SECONDS:
            return
        looked += passed
        records = read_records(folder)
        stillness.look(records, passed)
        if hanging := stillness.hanging(records):
            _end(folder, records, hanging, stillness.seconds[hanging[0].rank])

    try:
        yield check
    finally:
        _remove_records(folder)
        with suppress(OSError):  # the folder is not empty, or somebody has removed it
            for file in folder.iterdir():
                if not file.stat().st_size:
                    file.unlink()
            folder.rmdir()


def _remove_records(folder: Path) -> None:
    for record in folder.glob("*.json"):
        record.unlink(missing_ok=True)


def _end(folder: Path, records: Sequence[Record], hanging: Sequence[Record], seconds: float) -> None:
    """Have the stacks written, and raise HangError."""
    first, before = hanging[0], {record.rank: _size(folder, record) for record in records}
    stopped = _is_stopped(first)  # until the stacks are written
    _write_reason(folder, first.name)
    _await_stacks(folder, records, before)
    place = _place(folder, first, before[first.rank])
    if first.waits:
        said = f"all {len(records)} processes wait for each other in {first.phase}{place}, and none has moved for "
        said += f"{seconds:.0f} s: the network between them is gone, or a process has skipped what the others wait for"
    else:
        where = f"reward {first.reward!r}" if first.reward else first.phase
        said = f"{first.name} has not moved for {seconds:.0f} s in {where}{place}"
        said += ", and is stopped (SIGSTOP)" if stopped else ""
        said += "".join(f"; nor has {other.name}, in {other.doing}" for other in hanging[1:])
        waiting = len(records) - len(hanging)
        said += f"; {waiting} of {len(records)} processes wait for it" if waiting else ""
    said += f". The Python stacks of all threads are in {folder}/*.stacks"
    _write_reason(folder, said)
    raise HangError(f"hang: {said}", restartable=stopped or not first.reward)


def _write_reason(folder: Path, text: str) -> None:
    with suppress(OSError):  # a full disk is no reason to go on hanging
        (folder / HANG).write_text(text)


def _state(record: Record) -> str:
    """The state of the process, if it is one of this machine; else ""."""
    with suppress(psutil.Error):
        if record.is_here:
            return str(psutil.Process(record.pid).status())
    return ""


def _is_stopped(record: Record) -> bool:
    return _state(record) == psutil.STATUS_STOPPED


def _await_stacks(folder: Path, records: Sequence[Record], before: dict[int, int]) -> None:
    """Wait until all processes have written their stacks, or do not."""
    deadline, sizes = time.monotonic() + STACKS_SECONDS, before
    while time.monotonic() < deadline:
        time.sleep(0.5)
        former, sizes = sizes, {record.rank: _size(folder, record) for record in records}
        if sizes == former and all(size > before[rank] for rank, size in sizes.items()):
            return


def _size(folder: Path, record: Record) -> int:
    with suppress(OSError):
        return (folder / f"{record.rank}.stacks").stat().st_size
    return 0


def _place(folder: Path, record: Record, start: int) -> str:
    """Where the main thread of the process is, in code that is no library if there is any, as a part of a sentence; ""
    if it has written no stack."""
    with suppress(OSError):
        written = (folder / f"{record.rank}.stacks").read_bytes()[start:].decode(errors="replace")
        frames = [*FRAME.finditer(written.rpartition("hread 0x")[2])]  # faulthandler's order: the main thread is last
        own = [frame for frame in frames if not frame["file"].startswith(LIBRARIES)]
        for frame in own or frames:
            return " at {file}:{line} ({function})".format(**frame.groupdict())
    return ""
