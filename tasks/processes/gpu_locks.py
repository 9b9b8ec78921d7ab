"""Locks the GPUs of this machine that a stage's processes use, so that no other stage on the machine takes them.

Each GPU has a folder under LOCKS, which a stage locks by flock. The kernel frees the lock when the last process that
holds it has ended, however it ends. All users of the machine share LOCKS; containers share it if it is mounted in them.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from grpo_core.planning.hardware import query_gpus
from tasks.stages.errors import StageError
from tasks.stages.locks import holding, lock

LOCKS = Path("/tmp/grpo-gpus")
POLL_SECONDS = 1.0
VISIBLE, ORDER = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"


def visible_gpus() -> list[str]:
    """GPUs that this process's children see, each as CUDA_VISIBLE_DEVICES names it; empty without an NVIDIA GPU.

    As in CUDA, an entry of CUDA_VISIBLE_DEVICES that names no GPU hides those after it.
    """
    present = [line.strip() for line in query_gpus("index")]
    own = os.environ.get(VISIBLE)
    if own is None or not present:
        return present
    named = (name.strip() for name in own.split(","))
    return list(itertools.takewhile(lambda name: name in present or name.startswith(("GPU-", "MIG-")), named))


@contextmanager
def own_gpus(count: int, say: Callable[[str], None]) -> Iterator[None]:
    """Take `count` GPUs for this process and those it supervises, and name them in CUDA_VISIBLE_DEVICES during the
    block.

    Waits, and says so, until that many are free. Does nothing on a machine without GPUs. Raises StageError if this
    process sees fewer than `count`.
    """
    if not count or not visible_gpus():
        yield
        return
    taken = take_gpus(count, say)
    before = {name: os.environ.get(name) for name in (VISIBLE, ORDER)}
    with holding(*taken.values()):
        os.environ.update(variables(taken))
        try:
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value


def variables(gpus: dict[str, int]) -> dict[str, str]:
    """Environment variables of processes that use these GPUs. nvidia-smi numbers GPUs by their place on the bus, CUDA
    by default by their speed; numbers that a person gave are CUDA's."""
    return {VISIBLE: ",".join(gpus)} | ({} if VISIBLE in os.environ else {ORDER: "PCI_BUS_ID"})


def take_gpus(
    count: int, say: Callable[[str], None], pause: Callable[[], None] = lambda: time.sleep(POLL_SECONDS)
) -> dict[str, int]:
    """Lock the first `count` GPUs that are free; returns the file descriptor of each GPU's lock.

    Takes all or none, so that two stages never wait for each other. `pause` is called between attempts.
    """
    visible, waiting = visible_gpus(), False
    if count > len(visible):
        raise StageError(
            f"{count} GPUs are needed on this machine (train.num_processes / train.num_machines, and those of the vLLM "
            f"servers that the stage starts), but {len(visible)} are visible; lower one of them"
        )
    LOCKS.mkdir(exist_ok=True)
    with suppress(PermissionError):  # another user made it
        LOCKS.chmod(0o1777)
    while True:
        choosing = _open("choosing")
        try:
            fcntl.flock(choosing, fcntl.LOCK_EX)
            taken = _try_to_take(count, visible)
        finally:
            os.close(choosing)
        if len(taken) == count:
            return taken
        for descriptor in taken.values():
            os.close(descriptor)
        if not waiting:
            say(f"waiting for {count} GPUs of this machine: {len(taken)} of {len(visible)} are free (locks in {LOCKS})")
            waiting = True
        pause()


def _try_to_take(count: int, visible: list[str]) -> dict[str, int]:
    taken: dict[str, int] = {}
    for name in visible:
        if len(taken) == count:
            break
        descriptor = _open(_number(name))
        if lock(descriptor):
            taken[name] = descriptor
        else:
            os.close(descriptor)
    return taken


def _number(name: str) -> str:
    """Index of the GPU with this UUID, which may be shortened."""
    if name.isdecimal():
        return name
    known = (line.split(",") for line in query_gpus("index,uuid"))
    return next((index.strip() for index, uuid in known if uuid.strip().startswith(name)), name)


def _open(name: str) -> int:
    """Open a GPU's folder, which any user of the machine may lock, and return the descriptor. Files would not do:
    systemd removes old files from /tmp even if they are locked, and Linux refuses to open another user's file there
    with O_CREAT."""
    path = LOCKS / name
    path.mkdir(exist_ok=True)
    with suppress(PermissionError):  # another user made it
        path.chmod(0o755)
    return os.open(path, os.O_RDONLY)
