"""How often the base model solves each training prompt.

Entry point: `python -m grpo_core.probe RUN_DIR`.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from grpo_core.errors import GrpoError
from grpo_core.evaluation.probe import probe
from grpo_core.system import progress
from grpo_core.system.libraries import quiet_libraries
from grpo_core.system.processes import run_and_leave


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="grpo_core.probe", description="Measure how often RUN's base model solves each training prompt."
    )
    parser.add_argument("run", type=Path, help="run directory with config.toml and dataset/train.parquet")
    parser.add_argument("--output", type=Path, help="where to write; default RUN/probe")
    arguments = parser.parse_args()
    output = arguments.output or arguments.run / "probe"
    output.mkdir(parents=True, exist_ok=True)
    quiet_libraries()
    progress.start(output / progress.RANKS)  # before anything that may hang: imports from a shared disk may
    try:
        report = probe(arguments.run, output)
    except GrpoError as error:
        sys.exit(str(error))
    if report:
        (output / "report.json").write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    run_and_leave(main)
