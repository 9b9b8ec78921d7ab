"""Start a process that runs unreviewed code, and its guard, which ends everything that the process has started."""

from __future__ import annotations

import ctypes
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import typing
from contextlib import suppress

from grpo_core.system.descendants import adopt_orphans, kill_descendants, reap_orphans

PR_SET_PDEATHSIG = 1
OPEN_FILES = 1024  # of a process that runs unreviewed code
END_SECONDS = 15.0  # for a process to end: a little longer than the guard tries


def start_guarded(module: str) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Run `python -m MODULE DESCRIPTOR`, which calls `guarded`. Returns the guard's process, and the other end of the
    socket that the descriptor is."""
    control, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-P", "-m", module, str(theirs.fileno())]
        guard = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
            env=os.environ | own_gpu_first(),
        )
    return guard, control


def own_gpu_first() -> dict[str, str]:
    """Variables with which "cuda" means this process's GPU in a process that it starts, as it does here: there, this
    GPU and the first visible one change places, and the others keep their numbers."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized() or not (own := torch.cuda.current_device()):
        return {}
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = [*map(str, range(torch.cuda.device_count()))] if given is None else given.split(",")
    gpus[0], gpus[own] = gpus[own], gpus[0]
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus), "LOCAL_RANK": "0"}


def end_guarded(guard: subprocess.Popen[bytes], control: socket.socket) -> None:
    """Close the guard's input, which makes it end the process and everything that the process has started.

    The alarm of a reward's time limit is off meanwhile: its exception would leave a guard that never ends.
    """
    alarm = signal.setitimer(signal.ITIMER_REAL, 0)
    try:
        control.close()
        assert guard.stdin
        guard.stdin.close()
        guard.send_signal(signal.SIGCONT)  # the function may have stopped it
        guard.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        pass
    finally:
        guard.kill()
        guard.wait()
        signal.setitimer(signal.ITIMER_REAL, *alarm)


def guarded(control: socket.socket) -> None:
    """Fork, and return in the child, which alone keeps `control`; this process becomes its guard."""
    adopt_orphans()
    child = os.fork()
    if child:
        control.close()
        _guard(child)
    die_with_parent()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)


def die_with_parent() -> None:
    """Let the kernel end this process with its parent. Not inherited by forked processes."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def limit_resources(memory_gib: float) -> None:
    """Limit this process's memory and open files, and let it leave no core; no limit is raised."""
    limits = {
        resource.RLIMIT_DATA: int(memory_gib * 2**30),
        resource.RLIMIT_NOFILE: OPEN_FILES,
        resource.RLIMIT_CORE: 0,
    }
    for kind, value in limits.items():
        allowed = resource.getrlimit(kind)[1]
        value = value if allowed == resource.RLIM_INFINITY else min(value, allowed)
        resource.setrlimit(kind, (value, value))


def flush_output() -> None:
    """Flush what the code of this process has printed. It may have closed the streams."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()


def _guard(child: int) -> typing.NoReturn:
    """Wait until the child, the asking process or standard input ends. Then end what the child has left running, and
    end in the same way as the child."""
    signal.signal(signal.SIGCHLD, lambda *_: reap_orphans(child))
    waiting = select.poll()
    # The asking process may have forked: then standard input stays open after its end.
    for end in (0, os.pidfd_open(os.getppid()), os.pidfd_open(child)):
        waiting.register(end, select.POLLIN)
    waiting.poll()
    kill_descendants()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)
