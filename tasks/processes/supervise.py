"""`python -m tasks.processes.supervise [OPTIONS] GRACE COMMAND…`: run a command so that none of its processes outlives
the process that started it. Options: --silence SECONDS, --children-first, --descriptor NUMBER (an open file that the
command inherits).

A supervisor runs between a task and its training, and around the servers. It ends the command on SIGTERM, and when its
standard input, a pipe or sshd's socket, closes because the task's process has died, even by SIGKILL. It ends the
command in three steps: SIGTERM to the command's process group; up to GRACE seconds for all of it to end (a launcher may
die immediately while the trainer still saves); SIGKILL to every descendant left. As a subreaper it also finds
descendants in sessions of their own (ranks, engine processes).

With --silence, input has to arrive at least every SECONDS. Otherwise the machine that asks counts as gone or cut off,
and everything gets SIGKILL immediately: the training may have been started again elsewhere.

With --children-first, SIGTERM goes to the command's own process only when all other processes of its group have ended.
Prefect's runner and worker, told to end, immediately kill the flow runs that they watch.

It consists of two processes, since one could itself be killed: the supervisor, and its parent, the guard. Each ends
everything when the other dies.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import stat
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

import psutil

from grpo_core.system.descendants import (
    POLL_SECONDS,
    adopt_orphans,
    kill_descendants,
    reap_orphans,
    running_descendants,
)
from tasks.processes.stacks import write_stacks_when_asked


async def supervise(
    command: list[str],
    grace: float,
    from_guard: int,
    silence: float | None = None,
    children_first: bool = False,
    descriptors: Sequence[int] = (),
) -> int:
    """Run the command to its end or until told to stop. Returns its exit status, 128 + n if signal n ended it.

    `from_guard`: a pipe that closes when the guard dies. `silence`: longest time without input, in seconds.
    `children_first`: end the command's own process last. `descriptors`: open files that the command inherits.
    """
    loop = asyncio.get_running_loop()
    told_to_stop, cut_off = asyncio.Event(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told_to_stop.set)

    def give_up() -> None:
        cut_off.set()
        told_to_stop.set()

    def await_sign() -> asyncio.TimerHandle | None:
        return None if silence is None else loop.call_later(silence, give_up)

    patience = await_sign()

    def stop_at_end(pipe: int) -> None:
        nonlocal patience
        try:
            heard = os.read(pipe, 4096)
        except ConnectionError:
            heard = b""
        if not heard:
            told_to_stop.set()
        if patience is not None:
            patience.cancel()
            patience = await_sign()

    mode = os.fstat(0).st_mode
    # Not a terminal: when it closes, that means something else.
    from_asker = [0] if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) else []
    pipes = [from_guard, *from_asker]
    for pipe in pipes:
        loop.add_reader(pipe, stop_at_end, pipe)
    child = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.DEVNULL, start_new_session=True, pass_fds=descriptors
    )
    loop.add_signal_handler(signal.SIGCHLD, reap_orphans, child.pid)
    exited = asyncio.create_task(child.wait())
    stopped = asyncio.create_task(told_to_stop.wait())
    try:
        await asyncio.wait({exited, stopped}, return_when=asyncio.FIRST_COMPLETED)
        for pipe in pipes:
            loop.remove_reader(pipe)
        if patience is not None:
            patience.cancel()
        if cut_off.is_set():
            print("no sign of life from the machine that started this: all of it is ended", file=sys.stderr, flush=True)
        elif not exited.done():
            with suppress(TimeoutError):
                async with asyncio.timeout(grace):
                    await _end(child.pid, exited, children_first)
    finally:
        left = kill_descendants()
    code = -signal.SIGKILL if child.pid in left else await exited
    return code if code >= 0 else 128 - code


async def _end(leader: int, exited: asyncio.Task[int], children_first: bool) -> None:
    """Tell the leader's process group to end, and wait until all descendants have ended."""
    if children_first:
        await _end_children(leader)
    with suppress(ProcessLookupError):  # it may have ended meanwhile, for example by the same signal
        os.killpg(leader, signal.SIGTERM)
    while not exited.done() or running_descendants():
        await asyncio.sleep(POLL_SECONDS)


async def _end_children(leader: int) -> None:
    told = _children(leader)
    for process in told:
        with suppress(psutil.NoSuchProcess):
            process.terminate()
    while told & _children(leader):
        await asyncio.sleep(POLL_SECONDS)


def _children(leader: int) -> set[psutil.Process]:
    """Running processes of the leader's process group, except the leader."""
    found = set()
    for process in running_descendants():
        with suppress(ProcessLookupError):
            if process.pid != leader and os.getpgid(process.pid) == leader:
                found.add(process)
    return found


def guard(supervisor: int, grace: float) -> int:
    """Wait for the supervisor, passing signals on to it. If it is killed, end its descendants. Returns its status."""

    def pass_on(number: int, frame: object) -> None:
        with suppress(ProcessLookupError):
            os.kill(supervisor, number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, pass_on)
    code = os.waitstatus_to_exitcode(os.waitpid(supervisor, 0)[1])
    if code >= 0:
        return code
    deadline = time.monotonic() + grace
    for process in running_descendants():
        with suppress(psutil.NoSuchProcess):
            process.terminate()
    while running_descendants() and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    kill_descendants()
    return 128 - code


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--silence", type=float)
    parser.add_argument("--children-first", action="store_true")
    parser.add_argument("--descriptor", type=int, action="append", default=[])
    parser.add_argument("grace", type=float)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    grace, options = arguments.grace, (arguments.silence, arguments.children_first, arguments.descriptor)
    from_guard, to_supervisor = os.pipe()
    supervisor = os.fork()
    adopt_orphans()  # not inherited by fork: both call it
    if supervisor:
        sys.exit(guard(supervisor, grace))
    os.close(to_supervisor)
    write_stacks_when_asked()
    sys.exit(asyncio.run(supervise(arguments.command, grace, from_guard, *options)))


if __name__ == "__main__":
    main()
