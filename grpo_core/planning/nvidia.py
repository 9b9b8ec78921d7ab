"""This machine's NVIDIA GPUs, as nvidia-smi lists them, and those of them that CUDA shows. Imports no torch."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from grpo_core.errors import GrpoError

VISIBLE = "CUDA_VISIBLE_DEVICES"
LIMIT_SECONDS = 60.0  # a machine with eight GPUs takes more than ten to answer, without the driver's persistence mode
# Has nvidia0 and so on where a GPU may be used. /proc/driver/nvidia would not do: it shows every container of the
# machine all GPUs.
DEVICES = Path("/dev")
# The name, which may have commas, is last.
FIELDS = ("index", "uuid", "memory.total", "compute_cap", "driver_version", "mig.mode.current", "name")
OLD_FIELDS = ("index", "uuid", "memory.total", "driver_version", "name")  # of drivers before 510
NO_FIELD = "is not a valid field"
NO_GPU = "No devices were found"
SLICE = "MIG-"  # begins the UUID of a slice
KIND = re.compile(rf"GPU-|{SLICE}|(?=\d)")  # how an entry of CUDA_VISIBLE_DEVICES begins
WAY_OUT = f"to use the CPU all the same, set {VISIBLE} to nothing"


class DriverError(GrpoError):
    """Raised if this machine has a GPU, and nvidia-smi does not answer; the message has its words."""


@dataclass(frozen=True)
class Device:
    """A GPU, or a slice of one (MIG). `entry`: its name in CUDA_VISIBLE_DEVICES; `index`: number of the GPU on the bus;
    `memory_mib`: total memory, None if it is not known, as of a slice; `capability`: CUDA's compute capability."""

    entry: str
    index: str
    uuid: str
    name: str
    memory_mib: int | None
    capability: tuple[int, int] | None
    driver: str

    @property
    def is_slice(self) -> bool:
        return self.uuid.startswith(SLICE)


@dataclass(frozen=True)
class Listing:
    """Devices of this machine; `problem`: what nvidia-smi said beside them, as a sentence, or ""."""

    devices: tuple[Device, ...]
    problem: str = ""


def visible_devices() -> list[Device]:
    """The GPUs that CUDA shows to children of this process, and slices in place of a GPU that is divided into them.

    As in CUDA, an entry of CUDA_VISIBLE_DEVICES that names no GPU, or not in the way of the first entry, hides those
    after it; a GPU that is named twice hides all. Raises DriverError if nvidia-smi does not answer; it is not asked if
    CUDA_VISIBLE_DEVICES hides all GPUs.
    """
    given = os.environ.get(VISIBLE)
    if given is None:
        return [*list_devices().devices]
    entries = [entry.strip() for entry in given.split(",")]
    if not (kind := KIND.match(entries[0])):
        return []
    found: list[Device] = []
    for entry in entries:
        device = _named(entry) if (own := KIND.match(entry)) and own[0] == kind[0] else None
        if device is None:
            break
        if device in found:
            return []
        found.append(device)
    return found


def problem_of_driver() -> str:
    """What is wrong with the GPUs that nvidia-smi does not list, as a sentence; "" if nothing is known to be."""
    return list_devices().problem if visible_devices() else ""


@functools.cache  # a process asks once: the answer takes seconds, and two that differ would contradict each other
def list_devices() -> Listing:
    """All GPUs of this machine; none without a driver. Raises DriverError if there is one that does not answer."""
    fields, (output, status) = FIELDS, _query(FIELDS)
    if NO_FIELD in output:
        fields, (output, status) = OLD_FIELDS, _query(OLD_FIELDS)
    lines = [[part.strip() for part in line.split(",", len(fields) - 1)] for line in output.splitlines()]
    rows = [
        dict.fromkeys(FIELDS, "") | dict(zip(fields, line, strict=True))
        for line in lines
        if len(line) == len(fields) and line[0].isdecimal()
    ]
    if not rows:
        if NO_GPU not in output and _may_use_a_gpu():
            raise DriverError(
                f"this machine has an NVIDIA GPU, but nvidia-smi lists none: {_words(output, status)}; {WAY_OUT}"
            )
        return Listing(())
    slices = _list_slices() if any(row["mig.mode.current"] == "Enabled" for row in rows) else {}
    devices = []
    for row in rows:
        memory = int(row["memory.total"]) if row["memory.total"].isdecimal() else 0  # N/A if it is the CPU's
        capability = re.fullmatch(r"(\d+)\.(\d+)", row["compute_cap"])
        gpu = Device(
            row["index"],
            row["index"],
            row["uuid"],
            row["name"],
            memory or None,
            (int(capability[1]), int(capability[2])) if capability else None,
            row["driver_version"],
        )
        parts = [
            replace(gpu, entry=uuid, uuid=uuid, name=f"{profile} of one {gpu.name}", memory_mib=None)
            for profile, uuid in slices.get(gpu.index, [])
        ]
        devices += parts if row["mig.mode.current"] == "Enabled" else [gpu]
    problem = "" if not status else f"nvidia-smi lists {len(rows)} GPUs, and then fails: {_words(output, status)}"
    return Listing(tuple(devices), problem)


def used_memory() -> dict[str, int]:
    """MiB of each GPU that are in use at present, by UUID; not known of slices. Raises DriverError."""
    output, _ = _query(("uuid", "memory.used"))
    rows = (line.rpartition(",") for line in output.splitlines())
    return {uuid.strip(): int(used) for uuid, _, used in rows if used.strip().isdecimal()}


def _query(fields: Sequence[str]) -> tuple[str, int]:
    return _ask(f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits")


def _named(entry: str) -> Device | None:
    """The device that an entry of CUDA_VISIBLE_DEVICES names: by its number, or by a beginning of its UUID that is no
    other's. A number of a GPU that is divided stands for its first slice."""
    devices = list_devices().devices
    if entry.isdecimal():
        return next((device for device in devices if device.index == str(int(entry))), None)
    found = [device for device in devices if device.uuid.startswith(entry)]
    return replace(found[0], entry=found[0].uuid) if len(found) == 1 else None  # vLLM takes whole UUIDs only


def _list_slices() -> dict[str, list[tuple[str, str]]]:
    """Profile, such as MIG 1g.10gb, and UUID of each slice, by the number of its GPU. How much memory a slice has does
    not follow from its profile: 1g.18gb of an H200 has 16 GiB."""
    output, _ = _ask("-L")
    parts = re.split(r"^GPU (\d+):", output, flags=re.MULTILINE)[1:]
    part = re.compile(rf"^\s+(MIG \S+)\s+Device\s+\d+:\s+\(UUID: ({SLICE}[^)]+)\)", re.MULTILINE)
    return {gpu: part.findall(listed) for gpu, listed in zip(parts[::2], parts[1::2], strict=True)}


def _ask(*arguments: str) -> tuple[str, int]:
    """Output of nvidia-smi, and its exit status. Raises DriverError if it cannot be run where there is a GPU, or does
    not end."""
    program = shutil.which("nvidia-smi")
    if program is None:
        if not _may_use_a_gpu():
            return "", 0
        raise DriverError(
            "this machine has an NVIDIA GPU, but no nvidia-smi on PATH, by which GPUs are counted and shared: install "
            f"it, or start the container with NVIDIA_DRIVER_CAPABILITIES=compute,utility; {WAY_OUT}"
        )
    try:
        process = subprocess.Popen(
            [program, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
    except OSError as error:
        raise DriverError(f"{program} cannot be run: {error.strerror}; {WAY_OUT}") from error
    try:
        return process.communicate(timeout=LIMIT_SECONDS)[0], process.returncode
    except subprocess.TimeoutExpired:
        process.kill()
        with suppress(subprocess.TimeoutExpired):  # one that hangs in the driver cannot be killed
            process.communicate(timeout=1)
        raise DriverError(
            f"nvidia-smi has not answered within {LIMIT_SECONDS:g} s: the driver hangs, or starts slowly, which its "
            f"persistence mode mends (nvidia-smi -pm 1); {WAY_OUT}"
        ) from None


def _may_use_a_gpu() -> bool:
    return any(DEVICES.glob("nvidia[0-9]*"))


def _words(output: str, status: int) -> str:
    said = " ".join(line.strip() for line in output.splitlines() if line.count(",") < len(FIELDS) - 1)
    return f"status {status}" + f", {said.strip()}" * bool(said.strip())
