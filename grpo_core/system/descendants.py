"""Find and end all descendants of a process: the processes that it has started, and those that these have started."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from contextlib import suppress

import psutil

PR_SET_CHILD_SUBREAPER = 36
POLL_SECONDS = 0.02
KILL_SECONDS = 10.0  # within which a process dies of SIGKILL, unless it sleeps uninterruptibly


def adopt_orphans() -> None:
    """Make this process the parent of every descendant whose own parent dies. Not inherited by forked processes."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1)


def reap_orphans(own: int) -> None:
    """Wait for each child that has ended, except `own`, which other code waits for.

    Call it at each SIGCHLD in a long-lived process that adopts orphans: every run of the sandbox leaves one, and no
    process can be started once the machine's process ids, or those of a container, are spent.
    """
    with suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and ended.si_pid != own:
            os.waitpid(ended.si_pid, 0)


def kill_descendants() -> list[int]:
    """Send SIGKILL until no descendant is left, since one that is being killed may still start another. Returns the ids
    of those that do not die, and prints them to standard error.

    Zombies count as gone and are not waited for: their exit status belongs to the process that started them.
    """
    deadline = time.monotonic() + KILL_SECONDS
    while left := running_descendants():
        if time.monotonic() > deadline:
            ids = [process.pid for process in left]
            names = ", ".join(map(str, ids))
            print(f"left running, since SIGKILL does not end them (a driver that hangs?): {names}", file=sys.stderr)
            return ids
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(POLL_SECONDS)
    return []


def running_descendants() -> list[psutil.Process]:
    """Descendants that are not zombies."""
    return [process for process in psutil.Process().children(recursive=True) if _runs(process)]


def _runs(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
