"""Run a stage's process under supervision, and pass on its output line by line."""

from __future__ import annotations

import collections
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from tasks.stages.errors import StageError
from tasks.stages.locks import held_locks

TAIL_LINES = 25
GRACE_SECONDS = 20.0


class TimeLimitError(StageError):
    """A process that did not end within its time limit."""


def run_process(
    command: Sequence[str],
    on_line: Callable[[str], None],
    env: Mapping[str, str] | None = None,
    grace: float = GRACE_SECONDS,
    limit: float = threading.TIMEOUT_MAX,
) -> None:
    """Run `python COMMAND…` to its end. Raises StageError with its last lines if it fails, TimeLimitError if it has not
    ended after `limit` seconds.

    Whatever ends the caller (an exception, also in `on_line`; a signal; SIGKILL) also ends the process and all that it
    started: first SIGTERM, then after `grace` seconds SIGKILL. An exception is raised once all of them have ended.
    """
    tail: collections.deque[str] = collections.deque(maxlen=TAIL_LINES)
    with subprocess.Popen(
        [sys.executable, "-m", "tasks.processes.supervise", str(grace), sys.executable, *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
        pass_fds=held_locks(),
        env={**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONSAFEPATH": "1", **(env or {})},
    ) as process:
        assert process.stdout is not None
        late = threading.Event()

        def end() -> None:
            late.set()
            process.terminate()

        timer = threading.Timer(limit, end)
        timer.daemon = True
        timer.start()
        try:
            for line in process.stdout:
                tail.append(line.rstrip())
                on_line(line.rstrip())
            code = process.wait()
        except BaseException:
            process.terminate()
            for line in process.stdout:  # it still saves and prints, and would fail on a closed pipe
                with suppress(Exception):
                    on_line(line.rstrip())
            raise
        finally:
            timer.cancel()
    if code and late.is_set():
        raise TimeLimitError(
            f"{' '.join(command)} had not ended after {limit:g} s; its last lines:\n" + "\n".join(tail)
        )
    if code:
        raise StageError(f"{' '.join(command)} ended with {_status(code)}; its last lines:\n" + "\n".join(tail))


def _status(code: int) -> str:
    """Exit status, and the signal that it stands for."""
    with suppress(ValueError):
        return f"status {code} ({signal.Signals(code - 128).name})"
    return f"status {code}"
