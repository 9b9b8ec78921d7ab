"""Evaluate base, champion and trained policy on the same prompts, set by set, each prompt once; or what a run has
exported, on the same prompts as its trained policy.

Entry point: `python -m grpo_core.evaluate RUN_DIR`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from grpo_core import run_files
from grpo_core.evaluation.reporting import write_report
from grpo_core.evaluation.run import evaluate
from grpo_core.system.processes import run_and_leave


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="grpo_core.evaluate", description="Compare RUN's trained policy with its base, and with a champion."
    )
    parser.add_argument("run", type=Path, help="run directory with config.toml, dataset/ and training/model")
    parser.add_argument("--output", type=Path, help="where to write; default RUN/evaluation")
    parser.add_argument("--champion", type=Path, help="folder of the model to beat, as transformers loads it")
    parser.add_argument("--earlier", type=Path, help="samples.parquet of another run, evaluated the same way")
    parser.add_argument("--known", nargs="+", default=[], help="policies whose answers are taken from there")
    parser.add_argument("--exported", type=Path, help="folder of an export, to be compared with RUN's evaluated policy")
    arguments = parser.parse_args()
    output = arguments.output or arguments.run / run_files.EVALUATION

    def work() -> dict[str, Any]:
        if arguments.exported:
            from grpo_core.evaluation.exported import evaluate_exported  # imports polars, scipy

            return evaluate_exported(arguments.run, arguments.exported)
        return evaluate(arguments.run, output, arguments.champion, arguments.earlier, arguments.known)

    write_report(output, work)


if __name__ == "__main__":
    run_and_leave(main)
