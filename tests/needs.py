"""Programs of Debian's packages: where one is not there, tests that need it are skipped with the command to type."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

PACKAGES = {
    "bwrap": "bubblewrap",
    "chromium": "chromium",
    "ip": "iproute2",
    "munged": "munge",
    "nginx": "nginx-light",
    "postgres": "postgresql",
    "sbatch": "slurm-wlm",
    "slurmctld": "slurm-wlm",
    "slurmd": "slurm-wlm",
    "ssh": "openssh-client",
    "sshd": "openssh-server",
}
# Daemons are on no user's path.
PATH = os.pathsep.join([os.environ["PATH"], "/usr/sbin", *map(str, Path("/usr/lib/postgresql").glob("*/bin"))])


def needs(*programs: str) -> None:
    """Skip the test if a program is missing: always from this line, so that pytest's summary has one line per kind."""
    missing = sorted({PACKAGES[program] for program in programs if not shutil.which(program, path=PATH)})
    if missing:
        pytest.skip(f"not installed; as root: apt-get install {' '.join(missing)}")
