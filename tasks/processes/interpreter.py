"""The Python that trains, samples and evaluates: this one, or by GRPO_PYTHON that of an environment of its own.

vLLM and Prefect ask for different releases of packages that both use, so the newest of both are in two environments."""

from __future__ import annotations

import os
import sys

PYTHON = "GRPO_PYTHON"


def training_python() -> str:
    """Path of the Python that runs a training's processes, its servers, and the rehearsal of its rewards."""
    return os.environ.get(PYTHON) or sys.executable
