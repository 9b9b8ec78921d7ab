"""Programs of Debian's packages: where one is not there, tests that need it are skipped with the command to type."""

from __future__ import annotations

import os
import shutil
from ctypes.util import find_library
from pathlib import Path

import pytest

PACKAGES = {
    "bwrap": "bubblewrap",
    "chromium": "chromium",
    "g++": "g++",
    "ip": "iproute2",
    "libnuma": "libnuma1",
    "munged": "munge",
    "nginx": "nginx-light",
    "postgres": "postgresql",
    "sbatch": "slurm-wlm",
    "slurmctld": "slurm-wlm",
    "slurmd": "slurm-wlm",
    "ssh": "openssh-client",
    "sshd": "openssh-server",
}
VLLM = ("g++", "libnuma")  # what it takes on a CPU
# Daemons are on no user's path.
PATH = os.pathsep.join([os.environ["PATH"], "/usr/sbin", *map(str, Path("/usr/lib/postgresql").glob("*/bin"))])


def needs(*names: str) -> None:
    """Skip the test if one is missing: always from this line, so that pytest's summary has one line per kind."""
    missing = sorted({PACKAGES[name] for name in names if not _is_there(name)})
    if missing:
        pytest.skip(f"not installed; as root: apt-get install {' '.join(missing)}")


def _is_there(name: str) -> bool:
    return bool(find_library(name[3:]) if name.startswith("lib") else shutil.which(name, path=PATH))
