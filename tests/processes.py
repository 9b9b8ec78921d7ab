"""Questions about processes that may end between being listed and being asked."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

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
