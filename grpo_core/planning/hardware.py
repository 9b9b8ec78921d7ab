"""The hardware that a run is planned for: this machine's GPUs by nvidia-smi, or one that is named. Imports no torch."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass

NVIDIA_SMI_SECONDS = 10
MIB_PER_GIB = 1024
# MiB in all, as nvidia-smi shows them, by a part of the name. The first that fits counts: longer names come first.
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


@dataclass(frozen=True)
class Gpu:
    """A GPU's name and its memory; `memory_gib` is None if it is not known. `among`: the kinds of GPU of a machine that
    has several, of which this one has the least memory; otherwise ""."""

    name: str
    memory_gib: float | None = None
    among: str = ""


def find_gpu() -> Gpu | None:
    """The GPU with the least memory of those that a training on this machine sees; None without a GPU.

    CUDA_VISIBLE_DEVICES is respected if it lists numbers.
    """
    if not shutil.which("nvidia-smi"):
        return None
    command = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, timeout=NVIDIA_SMI_SECONDS, check=True).stdout
    except (OSError, subprocess.SubprocessError):  # a driver without a GPU
        return None
    gpus = [_read(line) for line in listed.splitlines() if line.strip()]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and re.fullmatch(r"[\d, ]*", visible):
        gpus = [gpus[number] for number in map(int, re.findall(r"\d+", visible)) if number < len(gpus)]
    if not gpus:
        return None
    smallest = min(gpus, key=lambda gpu: gpu.memory_gib or 0)
    names = [gpu.name for gpu in gpus]
    kinds = [f"{names.count(name)} × {name}" for name in dict.fromkeys(names)]
    return Gpu(smallest.name, smallest.memory_gib, ", ".join(kinds) if len(kinds) > 1 else "")


def named_gpu(name: str) -> Gpu:
    """A GPU that is not here, with its memory if the name is a known one."""
    known = (mib for part, mib in MEMORY_MIB.items() if re.search(rf"(?<![A-Z0-9]){part}(?![A-Z0-9])", name.upper()))
    mib = next(known, None)
    return Gpu(name, mib and mib / MIB_PER_GIB)


def name_hardware(gpu: Gpu | None) -> str:
    """The hardware for which a pace of training is known: the GPU's name, or "CPU with 2 cores"."""
    return gpu.name if gpu else f"CPU with {os.cpu_count()} cores"


def _read(line: str) -> Gpu:
    name, _, mib = line.rpartition(",")
    if not mib.strip().isdigit():  # "[N/A]", as on GPUs that share the CPU's memory
        return Gpu((name or mib).strip())
    return Gpu(name.strip(), int(mib) / MIB_PER_GIB)
