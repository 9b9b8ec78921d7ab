"""Run the work of an entry point that ends in a report."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from grpo_core import run_files
from grpo_core.errors import GrpoError
from grpo_core.system import progress
from grpo_core.system.libraries import quiet_libraries


def write_report(output: Path, work: Callable[[], dict[str, Any]]) -> None:
    """Do the work and write what it returns, if anything, as report.json under `output`. A GrpoError ends the process
    with its sentence."""
    output.mkdir(parents=True, exist_ok=True)
    quiet_libraries()
    progress.start(output / progress.RANKS)  # before anything that may hang: imports from a shared disk may
    try:
        report = work()
    except GrpoError as error:
        sys.exit(str(error))
    if report:
        (output / run_files.REPORT).write_text(json.dumps(report, indent=2) + "\n")
