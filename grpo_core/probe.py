"""Measure how often the base model solves each training prompt.

Entry point: `python -m grpo_core.probe RUN_DIR`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from grpo_core import run_files
from grpo_core.evaluation.probe import probe
from grpo_core.evaluation.reporting import write_report
from grpo_core.system.processes import run_and_leave


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="grpo_core.probe", description="Measure how often RUN's base model solves each training prompt."
    )
    parser.add_argument("run", type=Path, help="run directory with config.toml and dataset/train.parquet")
    parser.add_argument("--output", type=Path, help="where to write; default RUN/probe")
    arguments = parser.parse_args()
    output = arguments.output or arguments.run / run_files.PROBE
    write_report(output, lambda: probe(arguments.run, output))


if __name__ == "__main__":
    run_and_leave(main)
