"""`python -m tasks.supervise GRACE COMMAND…`: run a command so that nothing of it outlives whatever asked for it.

Stands between a task and its training, and around what serves flows. SIGTERM, or the end of the pipe that is its
standard input (the task's process died, even by SIGKILL), ends the command: SIGTERM to its process group, up to GRACE
seconds for all of them to end (a launcher may die at once while the trainer still saves), SIGKILL to every descendant
left. As the subreaper it also finds those that made sessions of their own (ranks, engine processes).

It is two processes, since one could itself be killed: the supervisor, and its parent, the guard. Each ends everything
when the other dies.
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
KILL_SECONDS = 10.0  # within which a process dies of SIGKILL, unless it sleeps uninterruptibly


async def supervise(command: list[str], grace: float, from_guard: int) -> int:
    """Run the command to its end or until told to stop; its exit status, 128 + n if signal n ended it.

    `from_guard`: a pipe whose end says that the guard has died.
    """
    loop = asyncio.get_running_loop()
    told_to_stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told_to_stop.set)
    pipes = [from_guard, *([0] if stat.S_ISFIFO(os.fstat(0).st_mode) else [])]  # a terminal's end says nothing
    for pipe in pipes:
        loop.add_reader(pipe, lambda pipe=pipe: os.read(pipe, 4096) or told_to_stop.set())
    child = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.DEVNULL, start_new_session=True)
    exited = asyncio.create_task(child.wait())
    stopped = asyncio.create_task(told_to_stop.wait())
    try:
        await asyncio.wait({exited, stopped}, return_when=asyncio.FIRST_COMPLETED)
        for pipe in pipes:
            loop.remove_reader(pipe)
        if not exited.done():
            with suppress(ProcessLookupError):  # it has died since, as when both were told to end
                os.killpg(child.pid, signal.SIGTERM)
            with suppress(TimeoutError):
                async with asyncio.timeout(grace):
                    while not exited.done() or _running_descendants():
                        await asyncio.sleep(POLL_SECONDS)
    finally:
        left = kill_descendants()
    code = -signal.SIGKILL if child.pid in left else await exited
    return code if code >= 0 else 128 - code


def guard(supervisor: int, grace: float) -> int:
    """Wait for the supervisor, pass signals on to it, and if it is killed, end what it has left; its exit status."""

    def pass_on(number: int, frame: object) -> None:
        with suppress(ProcessLookupError):
            os.kill(supervisor, number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, pass_on)
    code = os.waitstatus_to_exitcode(os.waitpid(supervisor, 0)[1])
    if code >= 0:
        return code
    deadline = time.monotonic() + grace
    for process in _running_descendants():
        with suppress(psutil.NoSuchProcess):
            process.terminate()
    while _running_descendants() and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    kill_descendants()
    return 128 - code


def kill_descendants() -> list[int]:
    """SIGKILL until none is left; a process killed here may still be starting another. Returns the ids of those that do
    not die, named on standard error.

    Zombies count as gone and are not waited for: whatever started the command waits for it and wants its status.
    """
    deadline = time.monotonic() + KILL_SECONDS
    while left := _running_descendants():
        if time.monotonic() > deadline:
            ids = [process.pid for process in left]
            names = ", ".join(map(str, ids))
            print(f"left behind, since SIGKILL does not end them (a driver that hangs?): {names}", file=sys.stderr)
            return ids
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(POLL_SECONDS)
    return []


def _running_descendants() -> list[psutil.Process]:
    return [process for process in psutil.Process().children(recursive=True) if _runs(process)]


def _runs(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def main() -> None:
    grace, command = float(sys.argv[1]), sys.argv[2:]
    from_guard, to_supervisor = os.pipe()
    supervisor = os.fork()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1)  # not inherited by fork: both call it
    if supervisor:
        sys.exit(guard(supervisor, grace))
    os.close(to_supervisor)
    sys.exit(asyncio.run(supervise(command, grace, from_guard)))


if __name__ == "__main__":
    main()
