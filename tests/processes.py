"""Questions about processes that may end between being listed and being asked, and patience."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import psutil


def existing(pids: Iterable[int]) -> list[psutil.Process]:
    """Those that exist, zombies too."""
    found = []
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(pid))
    return found


def with_variables(**expected: str) -> list[psutil.Process]:
    """All that run with these environment variables."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and expected.items() <= process.environ().items():
                found.append(process)
    return found


def runs(process: psutil.Process) -> bool:
    """True unless it has ended; a zombie has."""
    with suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def words(process: psutil.Process) -> list[str]:
    """Its command line; empty once it has ended."""
    with suppress(psutil.NoSuchProcess):
        return process.cmdline()
    return []


def parent(process: psutil.Process) -> int | None:
    with suppress(psutil.NoSuchProcess):
        return process.ppid()
    return None


def wait_for(condition: Callable[[], Any], seconds: float = 900.0, said: Callable[[], str] = str) -> Any:
    """What a condition gives once it holds; `said`: what a failure is to show."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not within {seconds:g} s\n{said()}"
        time.sleep(0.05)
    return found
