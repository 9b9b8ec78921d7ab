"""The lock of a run's directory: one process at a time writes into it."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil

from grpo_core.errors import GrpoError
from tasks.stages.access import check_access

# Longer than a supervised process is given to end, checkpoint included.
ENDING_SECONDS = 60.0
POLL_SECONDS = 0.1
LOCK = ".lock"

_locks: set[int] = set()


class RunInUseError(GrpoError):
    """Raised if another process writes into the run; the message says which process, since when and what to do."""

    exit_status = 1


@contextmanager
def locked(run: Path, say: Callable[[str], None] = print, wait: bool = False) -> Iterator[Path]:
    """Lock the run directory for this process. If another process works in it: wait when `wait` is set, and announce
    that through `say`; otherwise raise RunInUseError immediately.

    The kernel frees the lock when the holder and the processes that it supervises (`held_locks`) have ended, however
    they end. If the holder has died, or this is a retry of its flow run, those processes are about to end: they are
    waited for, up to ENDING_SECONDS, even without `wait`. Raises AccessError if this user may not write there.
    """
    while True:
        check_access(run, *(path for path in run.iterdir() if path.is_dir()), run / LOCK)
        descriptor = os.open(run / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        with holding(descriptor):
            _acquire(descriptor, run, say, wait)
            if _is_at(descriptor, run / LOCK):
                os.truncate(descriptor, 0)
                os.pwrite(descriptor, json.dumps(_this_process()).encode(), 0)
                yield run
                return
        run.mkdir(parents=True, exist_ok=True)  # it was removed meanwhile


@contextmanager
def holding(*descriptors: int) -> Iterator[None]:
    """Let processes started in the block inherit these locked files; close the files after it."""
    _locks.update(descriptors)
    try:
        yield
    finally:
        _locks.difference_update(descriptors)
        for descriptor in descriptors:
            os.close(descriptor)  # unlocking would also unlock it for the supervised processes


def held_locks() -> tuple[int, ...]:
    """File descriptors of the locks that this process holds. A supervisor that inherits them keeps the run locked until
    the supervised process has ended, even if this process dies first."""
    return tuple(_locks)


def _acquire(descriptor: int, run: Path, say: Callable[[str], None], wait: bool) -> None:
    deadline = time.monotonic() + ENDING_SECONDS
    waiting = False
    while not lock(descriptor):
        holder = _holder(descriptor)
        name = "process {pid} on {host} since {since}".format(**holder) if holder else "another process"
        if not wait and (not _is_ending(holder) or time.monotonic() > deadline):
            raise RunInUseError(
                f"run {run.name!r} is in use by {name} ({run}): two runs in one directory would overwrite each other. "
                "Wait until it has ended, cancel it, or give this run another name (--set name=...)"
            )
        if not waiting:
            patience = "until it is free" if wait else f"up to {ENDING_SECONDS:.0f} s until its processes have ended"
            say(f"run {run.name!r} is in use by {name}: waiting {patience}")
            waiting = True
        time.sleep(POLL_SECONDS)


def _is_at(descriptor: int, path: Path) -> bool:
    """True if the open file is still the one at this path."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), path.stat())
    return False


def lock(descriptor: int) -> bool:
    """Try to lock an open file; returns True if this succeeds."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _this_process() -> dict[str, Any]:
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "since": f"{datetime.now().astimezone():%Y-%m-%d %H:%M:%S %z}",
        "flow_run": os.environ.get("PREFECT__FLOW_RUN_ID"),  # set by Prefect's runner; the same in a retry
    }


def _holder(descriptor: int) -> dict[str, Any]:
    """Read the holder's entry in the lock file; empty until the holder has written it."""
    with suppress(ValueError):
        return json.loads(os.pread(descriptor, 4096, 0))
    return {}


def _is_ending(holder: dict[str, Any]) -> bool:
    """True if the holder has died, or is an earlier attempt of this flow run: either way, its processes are ending."""
    this = _this_process()
    retried = holder and holder["flow_run"] is not None and holder["flow_run"] == this["flow_run"]
    return bool(retried or (holder and holder["host"] == this["host"] and not psutil.pid_exists(holder["pid"])))
