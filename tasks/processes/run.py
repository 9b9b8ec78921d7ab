"""Run a stage's processes under supervision, and pass on their output line by line."""

from __future__ import annotations

import collections
import math
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress

from grpo_core.errors import LOST_PEER
from grpo_core.system.descendants import KILL_SECONDS
from tasks.stages.errors import StageError
from tasks.stages.locks import held_locks

PYTHON = "GRPO_PYTHON"
TAIL_LINES = 25
CHECK_SECONDS = 1.0
GRACE_SECONDS = 20.0
SIGNALLED = 128  # plus n: exit status of a process ended by signal n
TOLD = SIGNALLED + signal.SIGTERM
LAST_SIGNAL = 64
LOST = 254  # exit status of a relay if the connection to the other machine is lost
# Time for a failure to show on the machine where it began, once it made another machine fail; `grace` if that is more.
SETTLE_SECONDS = 60.0
OPEN_SECONDS = 2 * KILL_SECONDS  # for which an ended process's output may stay open, in addition to `grace`

_Lines = queue.SimpleQueue[tuple[str, str | None]]  # name of a process, and a line or its end


class TimeLimitError(StageError):
    """Raised if a process did not end within its time limit."""


class ProcessError(StageError):
    """Raised if a process failed. `restartable`: it has no fault of its own; it or a process that it works with was
    killed, or its machine or the network is gone. `told`: some process other than this one told it to stop, by
    SIGTERM."""

    def __init__(self, message: str, restartable: bool, told: bool = False):
        super().__init__(message)
        self.restartable, self.told = restartable, told


class TakenError(ProcessError):
    """Raised if a scheduler took the machines away, for example for another job; the training was told to stop
    before."""


def training_python() -> str:
    """Path of the Python that runs a training's processes, its servers, and the rehearsal of its rewards: this one, or
    by GRPO_PYTHON that of an environment of its own. vLLM and Prefect ask for different releases of packages that both
    use, so the newest of both are in two environments."""
    return os.environ.get(PYTHON) or sys.executable


def run_process(
    command: Sequence[str],
    on_line: Callable[[str], None],
    env: Mapping[str, str] | None = None,
    grace: float = GRACE_SECONDS,
    limit: float = threading.TIMEOUT_MAX,
    check: Callable[[], None] = lambda: None,
    python: str | None = None,
) -> None:
    """Run one `python COMMAND…` to its end, in the way `run_together` runs several."""
    run_together({"": command}, lambda name, line: on_line(line), {"": env or {}}, grace, limit, check, python=python)


def run_together(
    commands: Mapping[str, Sequence[str]],
    on_line: Callable[[str, str], None],
    env: Mapping[str, Mapping[str, str]] | None = None,
    grace: float = GRACE_SECONDS,
    limit: float = threading.TIMEOUT_MAX,
    check: Callable[[], None] = lambda: None,
    endless: Collection[str] = (),
    python: str | None = None,
) -> None:
    """Run `python COMMAND…` for each name, concurrently, until all have ended; those in `endless` are ended when the
    others have. `on_line` gets the name and each line; `env`: further environment variables, by name; `check` is
    called at least every CHECK_SECONDS; `python`: default `training_python`.

    If one fails, the others are ended too. Raises ProcessError with the name and the last lines of the one that failed
    by itself, and TimeLimitError if they have not ended after `limit` seconds.

    Whatever ends the caller (an exception, also in `on_line` and `check`; a signal; SIGKILL) also ends the processes
    and everything they started: first SIGTERM, then after `grace` seconds SIGKILL. An exception is raised once all have
    ended.
    """
    lines: _Lines = queue.SimpleQueue()
    tails = {name: collections.deque[str](maxlen=TAIL_LINES) for name in commands}
    running: dict[str, subprocess.Popen[str]] = {}
    followers: list[threading.Thread] = []
    deadline = time.monotonic() + min(limit, threading.TIMEOUT_MAX / 2)

    def keep_and_pass_on(name: str, line: str) -> None:
        tails[name].append(line)
        on_line(name, line)

    with ExitStack() as stack:
        try:
            for name, command in commands.items():
                running[name] = _start(command, (env or {}).get(name, {}), grace, python or training_python())
                stack.callback(_release, running[name])
                followers.append(
                    threading.Thread(target=_follow, args=(name, running[name], lines, grace), daemon=True)
                )
                followers[-1].start()
            ended = _wait(running, lines, keep_and_pass_on, check, deadline, grace, endless)
        except BaseException:
            _terminate(running)
            while any(follower.is_alive() for follower in followers) or not lines.empty():  # they still save and print
                _pass_on_next(lines, on_line)
            raise
    failed = {name: code for name, code in ended.items() if code}
    if failed:
        name = min(failed, key=lambda name: cause_rank(failed[name]))
        who = f"machine {name}" if name else " ".join(commands[name])
        raise ProcessError(
            f"{who} ended with {describe_status(failed[name])}; its last lines:\n" + "\n".join(tails[name]),
            restartable=was_killed_or_lost(failed[name]) or failed[name] in (TOLD, LOST_PEER),
            told=failed[name] == TOLD,
        )
    unfinished = commands.keys() - ended.keys() - {*endless}
    if unfinished and any(process.returncode for process in running.values()):
        [(name, command), *_] = commands.items()
        raise TimeLimitError(
            f"{' '.join(command)} had not ended after {limit:g} s; its last lines:\n" + "\n".join(tails[name])
        )


def _wait(
    running: Mapping[str, subprocess.Popen[str]],
    lines: _Lines,
    on_line: Callable[[str, str], None],
    check: Callable[[], None],
    deadline: float,
    grace: float,
    endless: Collection[str],
) -> dict[str, int]:
    """Wait until all processes have ended, and tell those that are left to end at the deadline, when one has failed, or
    when only `endless` ones are left. Returns the statuses of those that ended before the others were told to."""
    left, ended, told = {*running}, dict[str, int](), False
    while left:
        name, line = _next_line(lines, min(deadline - time.monotonic(), CHECK_SECONDS))
        if name is not None and line is not None:
            on_line(name, line)
        elif name is not None:
            left.remove(name)
            code = running[name].wait()
            if not told:
                ended[name] = code
                deadline = -math.inf if left <= {*endless} else min(deadline, _end_of_others(code, grace))
        if told or not left:
            continue
        if time.monotonic() < deadline:
            check()
        else:
            deadline, told = math.inf, True
            _terminate(running)
    return ended


def _next_line(lines: _Lines, seconds: float) -> tuple[str, str | None] | tuple[None, None]:
    """The next line or end, with the name of its process; nothing if none comes within `seconds`."""
    try:
        return lines.get(timeout=max(0.0, seconds))
    except queue.Empty:
        return None, None


def _end_of_others(code: int, grace: float) -> float:
    """When the other processes are told to end, if one has ended now with this status. A failure may be another's
    consequence, so its cause has time to show."""
    if not code:
        return math.inf
    return time.monotonic() + (0.0 if was_killed_or_lost(code) else max(SETTLE_SECONDS, grace))


def _pass_on_next(lines: _Lines, on_line: Callable[[str, str], None]) -> None:
    """Pass on a line if one comes soon; errors are dropped, since an earlier one is about to be raised."""
    with suppress(Exception):
        name, line = lines.get(timeout=0.1)
        if line is not None:
            on_line(name, line)


def _start(command: Sequence[str], env: Mapping[str, str], grace: float, python: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tasks.processes.supervise", str(grace), python, *command],
        stdin=subprocess.PIPE,  # it closes when this process dies
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
        pass_fds=held_locks(),
        env={**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONSAFEPATH": "1", **env},
    )


def _release(process: subprocess.Popen[str]) -> None:
    """Make the supervisor end all processes that are left, and wait for it."""
    assert process.stdin is not None
    process.stdin.close()
    process.wait()


def _follow(name: str, process: subprocess.Popen[str], lines: _Lines, grace: float) -> None:
    """Put each line of the process's output into the queue, and None once it has ended and no more lines come.

    If the process was killed, what it supervised ends within `grace`. A process that SIGKILL cannot end, as in a driver
    that hangs, keeps the output open: it is not waited for.
    """
    reader = threading.Thread(target=_read, args=(name, process, lines), daemon=True)
    reader.start()
    process.wait()
    reader.join(grace + OPEN_SECONDS)
    lines.put((name, None))


def _read(name: str, process: subprocess.Popen[str], lines: _Lines) -> None:
    assert process.stdout is not None
    with process.stdout:
        for line in process.stdout:
            lines.put((name, line.rstrip()))


def _terminate(running: Mapping[str, subprocess.Popen[str]]) -> None:
    for process in running.values():
        process.terminate()


def cause_rank(code: int) -> int:
    """Rank an exit status by how likely it is the cause of others; the lowest rank is the cause.

    If one process is killed, the others may fail in any way; if one is told to stop, all of them save and stop.
    """
    if was_killed_or_lost(code):
        return 0
    return {TOLD: 2, LOST_PEER: 3}.get(code, 1)


def was_killed_or_lost(code: int) -> bool:
    """True if a process that ended with this status was killed, or its machine is lost."""
    return code == LOST or (SIGNALLED < code <= SIGNALLED + LAST_SIGNAL and code != TOLD)


def describe_status(code: int) -> str:
    """Exit status and its meaning."""
    if code == LOST:
        return f"status {code}: the connection to it is lost"
    if code == LOST_PEER:
        return f"status {code}: another process, or the network to it, is gone"
    with suppress(ValueError):
        return f"status {code} ({signal.Signals(code - SIGNALLED).name})"
    return f"status {code}"
