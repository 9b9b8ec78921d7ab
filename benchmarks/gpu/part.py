"""Runs one part of `benchmarks.gpu_check` here: python -m benchmarks.gpu.part MODULE:FUNCTION SCRATCH ROWS"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path


def main(work: str, scratch: Path, rows: Path) -> None:
    from benchmarks.gpu.report import append

    module, _, function = work.partition(":")
    scratch.mkdir()
    getattr(importlib.import_module(f"benchmarks.gpu.{module}"), function)(scratch, lambda row: append(rows, row))


if __name__ == "__main__":
    name, scratch_folder, rows_file = sys.argv[1:]
    main(name, Path(scratch_folder), Path(rows_file))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # an engine's threads may hold the process
