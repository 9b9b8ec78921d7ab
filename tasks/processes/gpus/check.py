"""Checks what a GPU machine needs beside the Python packages. Without it, PyTorch would silently train on the CPU, or
fail when it first compiles a kernel."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

from grpo_core.errors import GrpoError
from grpo_core.planning.nvidia import visible_devices

OLDEST_DRIVER = {12: 525, 13: 580}  # NVIDIA's driver, by CUDA's major version (release notes of the CUDA toolkit)


class MachineError(GrpoError):
    """Raised if a machine cannot train on its GPU; the message says what to install."""


def check_gpu_machine() -> bool:
    """True if PyTorch trains on an NVIDIA GPU here. Raises MachineError if it should, and the driver is too old for it
    or Triton cannot compile kernels; DriverError if nvidia-smi does not answer. CUDA_VISIBLE_DEVICES may hide the
    GPU."""
    cuda = _cuda_of_torch()
    if cuda is None or not (devices := visible_devices()):
        return False
    oldest, driver = OLDEST_DRIVER.get(cuda), devices[0].driver
    # CUDA's compatibility package makes some older drivers do.
    if oldest and driver[:1].isdecimal() and int(driver.partition(".")[0]) < oldest and not _torch_finds_gpu():
        raise MachineError(
            f"the NVIDIA driver is {driver}, and the installed PyTorch, built for CUDA {cuda}, needs {oldest} or "
            "newer: with this one it would train on the CPU. Update the driver, or set CUDA_VISIBLE_DEVICES to nothing "
            "to train on the CPU"
        )
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        raise MachineError(
            "no C compiler is found, and Triton compiles GPU kernels with one while it trains: install gcc "
            "(Debian: apt install gcc), or name a compiler in CC"
        )
    headers = Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").exists():
        raise MachineError(
            f"Python's headers are not in {headers}, and Triton compiles GPU kernels with them while it trains: "
            "install them (Debian: apt install python3-dev)"
        )
    return True


def _cuda_of_torch() -> int | None:
    """Major version of CUDA that PyTorch is built for; None if it is built without CUDA. Doesn't import PyTorch, which
    would take seconds."""
    torch = find_spec("torch")
    if torch is None or torch.origin is None:
        return None
    found = re.search(r"^cuda\b.*= '(\d+)", Path(torch.origin).with_name("version.py").read_text(), re.MULTILINE)
    return int(found[1]) if found else None


def _torch_finds_gpu() -> bool:
    command = [sys.executable, "-c", "import sys, torch; sys.exit(not torch.cuda.is_available())"]
    return not subprocess.run(command, capture_output=True).returncode
