"""Files of a checkpoint written in a thread, from a copy in the host's memory, while the training goes on.

If the machine's memory does not hold the copy, the training waits instead. The threads of several processes communicate
in their own process group.
"""

from __future__ import annotations

import hashlib
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grpo_core.distributed import gathered, own_shard, processes_per_machine
from grpo_core.system.files import naming
from grpo_core.system.memory import GIB, available_memory, gib_text

MOST_OF_MEMORY = 0.5  # of what is free, for the copies of all processes: rewards and engines need some too


def in_thread(work: Callable[[], None]) -> Future[None]:
    """Do the work in a thread; the end of the process does not wait for it. Returns a Future of its end or error.

    The work uses the host's memory only: on a GPU, it would be another process's, since each thread begins on GPU 0.
    """
    done: Future[None] = Future()
    works = [work]

    def run() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})  # which wake the main thread
        try:
            works.pop()()  # the copy that it holds is gone before the Future says that it is done
        except BaseException as error:
            done.set_exception(error)
        else:
            done.set_result(None)

    threading.Thread(target=run, name="checkpoint", daemon=True).start()
    return done


def has_room_for_copy(tensors: dict[str, Any]) -> tuple[bool, str]:
    """Return whether every machine can hold a copy of what its processes write, and a sentence on the fullest one.
    Called by every process, before any of them copies."""
    each, count = gathered([(_own_bytes(tensors), available_memory())]), processes_per_machine()
    machines = [each[first : first + count] for first in range(0, len(each), count)]
    sizes = [(sum(own for own, _ in machine), min(free for _, free in machine)) for machine in machines]
    needed, free = max(sizes, key=lambda size: size[0] - MOST_OF_MEMORY * size[1])
    said = f"a copy takes {gib_text(needed / GIB)} of {gib_text(free / GIB)} of free memory"
    if needed <= MOST_OF_MEMORY * free:
        return True, f"checkpoints are written while the training goes on: {said}"
    return False, f"the training waits while a checkpoint is written: {said}, and may take {MOST_OF_MEMORY:.0%}"


def in_host_memory(tensors: dict[str, Any]) -> dict[str, Any]:
    """Copy nested dicts of tensors to host memory, out of reach of later changes; of sharded ones, the own shard."""
    return {
        name: value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else in_host_memory(value)
        for name, value in tensors.items()
    }


def _own_bytes(tensors: dict[str, Any]) -> int:
    values = tensors.values()
    return sum(own_shard(value).nbytes if isinstance(value, Tensor) else _own_bytes(value) for value in values)


def write(content: object, path: Path) -> None:
    """Do torch.save, but raise OSError, with the file's name, for a full disk."""
    with naming(path), path.open("wb") as file:
        torch.save(content, file)


def checksum(path: Path) -> str:
    """Hash of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()
