"""The hardware that a run is planned for: this machine's GPUs by nvidia-smi, or one that is named. Imports no torch."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from grpo_core.planning.nvidia import visible_devices
from grpo_core.system.memory import GIB, memory_limit

if TYPE_CHECKING:  # the small processes beside a training read this file
    from grpo_core.config.run import RunConfig

MIB_PER_GIB = 1024
# Total MiB as nvidia-smi shows it, by a part of the GPU's name. The first match counts, so longer names come first.
MEMORY_MIB = {
    "B200": 183_359,
    "H200": 143_771,
    "H100 NVL": 95_830,
    "H100": 81_559,
    "A100-PCIE-40GB": 40_960,
    "A100-SXM4-40GB": 40_960,
    "A100 40GB": 40_960,
    "A100": 81_920,
    "L40S": 46_068,
    "L40": 46_068,
    "RTX 6000 ADA": 49_140,
    "A6000": 49_140,
    "RTX 4090": 24_564,
    "RTX 3090": 24_576,
    "A10G": 23_028,
    "A10": 23_028,
    "L4": 23_034,
    "T4": 15_360,
}
# By the makers' data sheets, found as above: dense bf16 FLOP/s, and bytes per second of the GPU's memory.
SPEEDS = {
    "B200": (2250e12, 8e12),
    "H200 NVL": (835e12, 4.8e12),
    "H200": (989e12, 4.8e12),
    "H100 NVL": (835e12, 3.9e12),
    "H100 PCIE": (756e12, 2e12),
    "H100": (989e12, 3.35e12),
    "A100-PCIE-40GB": (312e12, 1.555e12),
    "A100-SXM4-40GB": (312e12, 1.555e12),
    "A100 40GB": (312e12, 1.555e12),
    "A100": (312e12, 2.039e12),
    "A6000": (155e12, 0.768e12),
}
GPUS_PER_MACHINE = 8  # assumed of a machine that is not this one
# Bytes per second and direction, assumed: of a GPU within its machine (NVLink by the data sheet of an A100), and of a
# whole machine to the others (one network adapter of 200 Gbit/s).
WITHIN_MACHINE, BETWEEN_MACHINES = 300e9, 25e9
TO_HOST = 25e9  # the same between a GPU and its host's memory (PCIe 4.0 with 16 lanes; 32e9 by its specification)
Value = TypeVar("Value")
BEFORE_BF16 = {"T4": (7, 5), "V100": (7, 0), "P100": (6, 0)}  # compute capability


@dataclass(frozen=True)
class Gpu:
    """A GPU's name and its memory; `memory_gib` is None if it is not known. `among`: the kinds of GPU of a machine
    that has several, of which this one has the least memory; otherwise "". `per_machine`: GPUs of its machine that a
    training can use together, `host_gib`: that machine's own memory; None if the machine is not this one.
    `capability`: CUDA's compute capability, the lowest of the machine's; None if it is not known."""

    name: str
    memory_gib: float | None = None
    among: str = ""
    per_machine: int | None = None
    host_gib: float | None = None
    capability: tuple[int, int] | None = None


def find_gpu() -> Gpu | None:
    """The GPU with the least memory of those that a training on this machine sees; None without a GPU. Raises
    DriverError if there is one, and nvidia-smi does not answer.

    A process sees one slice of a GPU (MIG) at most, so slices do not count as several.
    """
    devices = visible_devices()
    if not devices:
        return None
    smallest = min(devices, key=lambda device: device.memory_mib or 0)
    names = [device.name for device in devices]
    kinds = [f"{names.count(name)} × {name}" for name in dict.fromkeys(names)]
    among = ", ".join(kinds) if len(kinds) > 1 else ""
    whole = sum(not device.is_slice for device in devices)
    memory = smallest.memory_mib and smallest.memory_mib / MIB_PER_GIB
    lowest = min((device.capability for device in devices if device.capability), default=None)
    return Gpu(smallest.name, memory, among, max(1, whole), memory_limit() / GIB, lowest)


def named_gpu(name: str) -> Gpu:
    """A GPU that is not here, with its memory if the name is known."""
    mib = by_name(MEMORY_MIB, name)
    return Gpu(name, mib and mib / MIB_PER_GIB)


def capability(gpu: Gpu | None) -> tuple[int, int] | None:
    """Compute capability; of a GPU that is only named, precise enough to choose the precision: that of bf16 unless the
    name is an older GPU's. None for a CPU."""
    from grpo_core.config.training import BF16_CAPABILITY  # with pydantic, which those who only ask nvidia-smi save

    return (gpu.capability or by_name(BEFORE_BF16, gpu.name) or BF16_CAPABILITY) if gpu else None


def hardware_notes(config: RunConfig, gpu: Gpu | None, named: bool = False) -> list[str]:
    """Sentences on what may surprise about this configuration on this GPU, which the user may have `named`; none for a
    CPU."""
    if gpu is None:
        return []
    found = config.with_precision(capability(gpu)).gpu_notes
    if gpu.memory_gib is None:
        known = f" (known by name: {', '.join(MEMORY_MIB)})" if named else ""
        found.append(
            f"the memory of {gpu.name} is not known{known}: the plan neither says whether the run fits nor chooses the "
            "tokens of a pass"
        )
    return found


def name_hardware(gpu: Gpu | None) -> str:
    """The hardware for which a pace of training is known: the GPU's name, or "CPU with 2 cores"."""
    return gpu.name if gpu else f"CPU with {os.cpu_count()} cores"


def by_name(table: Mapping[str, Value], name: str) -> Value | None:
    """Value of the first entry whose key occurs in the GPU's name as whole words."""
    found = (value for part, value in table.items() if re.search(rf"(?<![A-Z0-9]){part}(?![A-Z0-9])", name.upper()))
    return next(found, None)
