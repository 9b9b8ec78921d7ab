"""Notices that a training hangs, which process stands still, and where in the code.

The stage looks at the processes' records (`grpo_core.system.progress`) and counts how long each has not moved. Time in
which the stage itself is stopped, or its machine sleeps, does not count. If a process has stood still for longer than
its limit, the stage writes the reason into the file HANG. On each machine, the supervisor sees that
(`tasks.processes.stacks`) and makes its processes write their Python stacks. Then the stage ends all of them.
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
STACKS_SECONDS = 15.0  # to wait for all processes to write their stacks
LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)')


class HangError(ProcessError):
    """Raised for a training that was ended because it hung; the message says what stands still, for how long and
    where."""


@dataclass
class Stillness:
    """Time for which each process has not moved, in seconds; counts only while this process looks."""

    seconds: dict[int, float] = field(default_factory=dict)
    moves: dict[int, tuple[int, int]] = field(default_factory=dict)

    def look(self, records: Sequence[Record], passed: float) -> None:
        """Update the times. `passed`: seconds since the last look, of which at most twice the planned interval counts:
        if more passed, this process was stopped too. A process that a debugger has stopped counts as moving."""
        for record in records:
            now = (record.pid, record.moves)
            if self.moves.get(record.rank) != now or _state(record) == psutil.STATUS_TRACING_STOP:
                self.seconds[record.rank] = 0.0
            else:
                self.seconds[record.rank] += min(passed, 2 * CHECK_SECONDS)
            self.moves[record.rank] = now

    def hanging(self, records: Sequence[Record]) -> list[Record]:
        """Return the processes that hang, stopped ones first, then by time without progress; empty if nothing hangs.

        A process that waits for others does not hang, unless all wait: then all are returned. As long as one working
        process is within its limit, nothing hangs: the others may be waiting for it without their records saying so
        (NCCL).
        """
        blocking = [record for record in records if not record.waits] or records
        all_late = all(self.seconds[record.rank] > record.limit for record in blocking)
        all_there = len(records) == max((record.ranks for record in records), default=0)

        def order(record: Record) -> tuple[bool, float, float]:
            return not _is_stopped(record), -self.seconds[record.rank], record.moved

        return sorted(blocking, key=order) if all_late and all_there else []


@contextmanager
def watchdog(folder: Path, clock: Callable[[], float] = time.monotonic) -> Iterator[Callable[[], None]]:
    """Give a function that checks the training whose processes keep their records in the folder. Call it again and
    again: it looks every CHECK_SECONDS. Records are removed before and after the block.

    The check raises HangError once the stacks are written. The error is restartable, unless a reward function hangs.
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
        with suppress(OSError):  # the folder is not empty, or has been removed
            for file in folder.iterdir():
                if not file.stat().st_size:
                    file.unlink()
            folder.rmdir()


def _remove_records(folder: Path) -> None:
    for record in folder.glob("*.json"):
        record.unlink(missing_ok=True)


def _end(folder: Path, records: Sequence[Record], hanging: Sequence[Record], seconds: float) -> None:
    """Wait until the stacks are written, and raise HangError."""
    first, before = hanging[0], {record.rank: _size(folder, record) for record in records}
    stopped = _is_stopped(first)  # until the stacks are written
    _write_reason(folder, first.name)
    _await_stacks(folder, records, before)
    # A stopped reward is past its time limit, so it may have left the place by the time its stack is written.
    place = "" if stopped and first.reward else _place(folder, first, before[first.rank])
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
    with suppress(OSError):  # a full disk must not keep the training hanging
        (folder / HANG).write_text(text)


def _state(record: Record) -> str:
    """State of the process, if it runs on this machine; else ""."""
    with suppress(psutil.Error):
        if record.is_here:
            return str(psutil.Process(record.pid).status())
    return ""


def _is_stopped(record: Record) -> bool:
    return _state(record) == psutil.STATUS_STOPPED


def _await_stacks(folder: Path, records: Sequence[Record], before: dict[int, int]) -> None:
    """Wait until all processes have written their stacks, at most STACKS_SECONDS."""
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
    """Describe where the main thread of the process is, preferably outside libraries, as part of a sentence; "" if the
    process has written no stack."""
    with suppress(OSError):
        written = (folder / f"{record.rank}.stacks").read_bytes()[start:].decode(errors="replace")
        frames = [*FRAME.finditer(written.rpartition("hread 0x")[2])]  # faulthandler's order: the main thread is last
        own = [frame for frame in frames if not frame["file"].startswith(LIBRARIES)]
        for frame in own or frames:
            return " at {file}:{line} ({function})".format(**frame.groupdict())
    return ""
