"""Locks the GPUs of this machine that a stage's processes use, so that no other stage on the machine takes them.

Each GPU has a folder under LOCKS, which a stage locks by flock. The kernel frees the lock when the last process that
holds it has ended, however it ends. All users of the machine share LOCKS; containers share it if it is mounted in them.
GPUs that other people's work uses have no lock: they are known by the memory that is in use.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from grpo_core.planning.hardware import MIB_PER_GIB
from grpo_core.planning.nvidia import VISIBLE, Device, problem_of_driver, used_memory, visible_devices
from grpo_core.system.memory import gib_text
from tasks.stages.errors import StageError
from tasks.stages.locks import holding, lock

LOCKS = Path("/tmp/grpo-gpus")
POLL_SECONDS = 1.0
ORDER = "CUDA_DEVICE_ORDER"
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
IN_USE_MIB = 2048  # more than the windows of a desktop take: then the GPU is in use
Taken = dict[str, int]  # GPUs as CUDA_VISIBLE_DEVICES names them, each with the file descriptor of its lock


@contextmanager
def own_gpus(count: int, say: Callable[[str], None]) -> Iterator[None]:
    """Take `count` GPUs for this process and those it supervises, and name them in CUDA_VISIBLE_DEVICES during the
    block.

    Waits, and says so, until that many are free. Does nothing on a machine without GPUs. Raises StageError if this
    process sees fewer than `count`.
    """
    if not count or not visible_devices():
        yield
        return
    taken = take_gpus(count, say)
    with holding(*taken.values()), _environment(variables(taken)):
        yield


@contextmanager
def one_free_gpu() -> Iterator[str]:
    """Take one GPU for work that can do without. In the block, this process and its children see that GPU alone, or
    none if none is free at present. Gives the reason for that; "" if one was taken, or if this machine has none."""
    visible = visible_devices()
    if not visible:
        yield ""
        return
    with _locking_free(visible) as (free, kept):
        used = used_memory() if free else {}
        kept += [device for device in free if not _is_in_use(device, used)][:1]
        taken = {device.entry: free[device] for device in kept}
    if taken:
        with holding(*taken.values()), _environment(variables(taken)):
            yield ""
        return
    locked = f"{len(visible) - len(free)} of {len(visible)} GPUs are locked by stages (in {LOCKS})"
    reasons = [locked] * (len(free) < len(visible)) + [f"others use {_listed(free, used)}"] * bool(free)
    with _environment({VISIBLE: ""}):
        yield "; ".join(reasons)


def variables(gpus: Taken) -> dict[str, str]:
    """Environment variables of processes that use these GPUs. nvidia-smi numbers GPUs by their place on the bus, CUDA
    by default by their speed; numbers that a person gave are CUDA's."""
    return {VISIBLE: ",".join(gpus)} | ({} if VISIBLE in os.environ else {ORDER: "PCI_BUS_ID"})


def take_gpus(
    count: int, say: Callable[[str], None], pause: Callable[[], None] = lambda: time.sleep(POLL_SECONDS)
) -> Taken:
    """Lock `count` GPUs: of those that are free, the first that others do not use, and if these are too few, those of
    which others use least memory, which `say` is told.

    Takes all or none, so that two stages never wait for each other. `pause` is called between attempts.
    """
    visible, waiting = visible_devices(), False
    # CUDA shows a process one slice of a GPU at most, so several processes cannot have one each.
    usable = [device for device in visible if count == 1 or not device.is_slice]
    if count > len(usable):
        beside = "" if len(usable) == len(visible) else ", beside slices of GPUs (MIG), which do not work together"
        reason = f" ({problem})" if (problem := problem_of_driver()) else ""
        raise StageError(
            f"{count} GPUs are needed on this machine (train.num_processes / train.num_machines, and those of the vLLM "
            f"servers that the stage starts), but {len(usable)} are visible{beside}{reason}; lower one of them"
        )
    while True:
        with _locking_free(usable) as (free, kept):
            if len(free) >= count:
                used = used_memory()
                by_use = sorted(free, key=lambda device: used.get(device.uuid, 0) * _is_in_use(device, used))
                chosen = [device for device in usable if device in by_use[:count]]
                _tell_use(by_use[count:], chosen, used, say)
                kept += chosen
                return {device.entry: free[device] for device in chosen}
        if not waiting:
            say(f"waiting for {count} GPUs of this machine: {len(free)} of {len(usable)} are free (locks in {LOCKS})")
            waiting = True
        pause()


def _tell_use(
    left: Sequence[Device], chosen: Sequence[Device], used: Mapping[str, int], say: Callable[[str], None]
) -> None:
    if skipped := [device for device in left if _is_in_use(device, used)]:
        say(f"left out, since others use them: {_listed(skipped, used)}")
    if shared := [device for device in chosen if _is_in_use(device, used)]:
        say(
            f"taken although others use them, since no emptier GPU is free: {_listed(shared, used)}. If memory runs "
            f"out, choose other GPUs by {VISIBLE}"
        )


def _is_in_use(device: Device, used: Mapping[str, int]) -> bool:
    return used.get(device.uuid, 0) > IN_USE_MIB


def _listed(devices: Iterable[Device], used: Mapping[str, int]) -> str:
    return ", ".join(f"GPU {it.entry} ({gib_text(used[it.uuid] / MIB_PER_GIB)} in use)" for it in devices)


@contextmanager
def _environment(own: Mapping[str, str]) -> Iterator[None]:
    """Set these environment variables during the block."""
    before = {name: os.environ.get(name) for name in own}
    os.environ.update(own)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


@contextmanager
def _locking_free(devices: Sequence[Device]) -> Iterator[tuple[dict[Device, int], list[Device]]]:
    """Lock those of the devices that are free. In the block, no other process locks any; after it, those that are not
    in the list are freed. Gives the file descriptor of each one's lock, and the list."""
    free, kept = dict[Device, int](), list[Device]()
    folder = _open(LOCKS, 0o1777)
    choosing = _open("choosing", within=folder)
    try:
        fcntl.flock(choosing, fcntl.LOCK_EX)
        for device in devices:
            descriptor = _open(device.uuid.replace("/", "-") if device.is_slice else device.index, within=folder)
            if lock(descriptor):
                free[device] = descriptor
            else:
                os.close(descriptor)
        yield free, kept
    finally:
        for device, descriptor in free.items():
            if device not in kept:
                os.close(descriptor)
        os.close(choosing)
        os.close(folder)


def _open(name: str | Path, mode: int = 0o755, within: int | None = None) -> int:
    """Open a folder of the locks, which any user of the machine may lock, and return the descriptor. Makes it, with
    this mode, if it does not exist. Files would not do: systemd removes old files from /tmp even if they are locked,
    and Linux refuses to open another user's file there with O_CREAT.

    Another user may have put anything under the name: links are not followed, and only a folder made here gets the
    mode. Raises StageError if it cannot be opened.
    """
    try:
        with suppress(FileExistsError):
            os.mkdir(name, dir_fd=within)
            descriptor = os.open(name, FOLDER, dir_fd=within)
            os.fchmod(descriptor, mode)
            return descriptor
        return os.open(name, FOLDER, dir_fd=within)
    except OSError as error:
        raise StageError(
            f"{LOCKS / name} cannot be locked ({error.strerror}): GPUs are shared by locks on folders that every user "
            "of the machine may open; have its owner, or the administrator, remove it"
        ) from error
