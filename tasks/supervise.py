"""`python -m tasks.supervise GRACE COMMAND…`: run a command so that nothing of it outlives whoever asked for it.

Stands between a task and its training. SIGTERM, or the end of its standard input (the task's process died, even by
SIGKILL), ends the command: SIGTERM to its process group, GRACE seconds, SIGKILL to every descendant. As the
subreaper it also finds descendants that made sessions of their own (ranks, engine processes).
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
import time

import psutil

PR_SET_CHILD_SUBREAPER = 36
KILL_POLL_SECONDS = 0.01


async def supervise(command: list[str], grace: float) -> int:
    """Run the command to its end or until told to stop; its exit status, 128 + n when signal n ended it."""
    loop = asyncio.get_running_loop()
    told_to_stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told_to_stop.set)
    loop.add_reader(sys.stdin, lambda: os.read(sys.stdin.fileno(), 4096) or told_to_stop.set())
    child = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.DEVNULL, start_new_session=True)
    exited = asyncio.create_task(child.wait())
    stopped = asyncio.create_task(told_to_stop.wait())
    await asyncio.wait({exited, stopped}, return_when=asyncio.FIRST_COMPLETED)
    loop.remove_reader(sys.stdin)
    if not exited.done():
        os.killpg(child.pid, signal.SIGTERM)
        await asyncio.wait({exited}, timeout=grace)
    kill_descendants()
    code = await exited
    return code if code >= 0 else 128 - code


def kill_descendants() -> None:
    """SIGKILL until none is left; a process killed here may still be starting another.

    Zombies count as gone and are not waited for: who started the command waits for it and wants its status.
    """
    while sum(map(_kill, psutil.Process().children(recursive=True))):
        time.sleep(KILL_POLL_SECONDS)


def _kill(process: psutil.Process) -> bool:
    """SIGKILL it; False when there was nothing left to kill."""
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        process.kill()
    except psutil.NoSuchProcess:
        return False
    return True


def main() -> None:
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1)
    sys.exit(asyncio.run(supervise(sys.argv[2:], float(sys.argv[1]))))


if __name__ == "__main__":
    main()
