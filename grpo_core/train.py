"""Entry point of the training process: `accelerate launch -m grpo_core.train RUN_DIR`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from grpo_core.environment import quiet_libraries


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="grpo_core.train", description="Train RUN as its config.toml and plan.json say."
    )
    parser.add_argument("run", type=Path, help="run directory with config.toml, plan.json and dataset/train.parquet")
    parser.add_argument("--output", type=Path, help="where to write; default RUN/training")
    parser.add_argument("--report-to", help="an Accelerate tracker that gets the metrics live, such as mlflow")
    arguments = parser.parse_args()
    output = arguments.output or arguments.run / "training"
    if (output / "result.json").exists():
        sys.exit(f"{output} holds a finished training (result.json); move it away to train again")
    quiet_libraries()
    from grpo_core.trainer import train

    train(arguments.run, output, arguments.report_to)


if __name__ == "__main__":
    main()
