"""`python -m tasks.supervise GRACE COMMAND…`: run a command so that nothing of it outlives whoever asked for it.

Stands between a task and its training, and around what serves flows. SIGTERM, or the end of the pipe that is its
standard input (the task's process died, even by SIGKILL), ends the command: SIGTERM to its process group, up to GRACE
seconds for all of them to end (a launcher may die at once while the trainer still saves), SIGKILL to every descendant
left. As the subreaper it also finds those that made sessions of their own (ranks, engine processes).
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import stat
import sys
import time
from contextlib import suppress

import psutil

PR_SET_CHILD_SUBREAPER = 36
POLL_SECONDS = 0.02


async def supervise(command: list[str], grace: float) -> int:
    """Run the command to its end or until told to stop; its exit status, 128 + n when signal n ended it."""
    loop = asyncio.get_running_loop()
    told_to_stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told_to_stop.set)
    watched = stat.S_ISFIFO(os.fstat(0).st_mode)  # a terminal or /dev/null says nothing of who started this
    if watched:
        loop.add_reader(0, lambda: os.read(0, 4096) or told_to_stop.set())
    child = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.DEVNULL, start_new_session=True)
    exited = asyncio.create_task(child.wait())
    stopped = asyncio.create_task(told_to_stop.wait())
    await asyncio.wait({exited, stopped}, return_when=asyncio.FIRST_COMPLETED)
    if watched:
        loop.remove_reader(0)
    if not exited.done():
        os.killpg(child.pid, signal.SIGTERM)
        with suppress(TimeoutError):
            async with asyncio.timeout(grace):
                while not exited.done() or any(map(_runs, psutil.Process().children(recursive=True))):
                    await asyncio.sleep(POLL_SECONDS)
    kill_descendants()
    code = await exited
    return code if code >= 0 else 128 - code


def kill_descendants() -> None:
    """SIGKILL until none is left; a process killed here may still be starting another.

    Zombies count as gone and are not waited for: who started the command waits for it and wants its status.
    """
    while sum(map(_kill, psutil.Process().children(recursive=True))):
        time.sleep(POLL_SECONDS)


def _kill(process: psutil.Process) -> bool:
    """SIGKILL it; False when there was nothing left to kill."""
    if not _runs(process):
        return False
    with suppress(psutil.NoSuchProcess):
        process.kill()
    return True


def _runs(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def main() -> None:
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1)
    sys.exit(asyncio.run(supervise(sys.argv[2:], float(sys.argv[1]))))


if __name__ == "__main__":
    main()
