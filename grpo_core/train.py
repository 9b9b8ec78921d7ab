"""Entry point of the training process: `python -m grpo_core.train RUN_DIR`; several processes by `torchrun`.

Exit status 143: stopped by SIGTERM or SIGINT after saving a checkpoint. Exit status 75 (LOST_PEER): another process is
gone, or the network to it. Exit status 1: it failed. If a reward or the engine failed, for instance because a server
is gone, the checkpoint is saved all the same.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from pathlib import Path

from grpo_core import run_files
from grpo_core.system import progress
from grpo_core.system.libraries import quiet_libraries
from grpo_core.system.processes import importing, run_and_leave

BLAME_SECONDS = 5.0  # time for the process that failed by itself to end first, as the launcher sees it


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="grpo_core.train", description="Train RUN as its config.toml and plan.json say."
    )
    parser.add_argument("run", type=Path, help="run directory with config.toml, plan.json and dataset/train.parquet")
    parser.add_argument("--output", type=Path, help="where to write; default RUN/training")
    parser.add_argument(
        "--warm-start",
        action="store_true",
        help="train on the run's demonstrations as [warm_start] says; default output RUN/warm-start",
    )
    arguments = parser.parse_args()
    output = arguments.output or arguments.run / (run_files.WARM_START if arguments.warm_start else run_files.TRAINING)
    if (output / run_files.RESULT).exists():
        sys.exit(f"{output} holds a finished training ({run_files.RESULT}); move it away to train again")
    quiet_libraries()
    progress.start(output / progress.RANKS)  # before anything that may hang: imports from a shared disk may
    with importing():
        from grpo_core.distributed import lost_peer
        from grpo_core.errors import LOST_PEER, GrpoError
        from grpo_core.training.interrupt import EXIT_STATUS, Stopped
        from grpo_core.training.loop import train

    try:
        train(arguments.run, output, warm_start=arguments.warm_start)
    except Stopped:
        # Everything is saved, and taking engines down would take time.
        os._exit(EXIT_STATUS)
    except GrpoError as error:
        sys.exit(str(error))
    except Exception as error:
        if "does not have a deterministic implementation" in str(error):  # torch's
            traceback.print_exc()
            sys.exit(f"train.deterministic = true, but this model needs what PyTorch has not got: {error}")
        if not lost_peer(error):
            raise
        traceback.print_exc()
        sys.stdout.flush()
        time.sleep(BLAME_SECONDS)
        os._exit(LOST_PEER)  # taking engines down could wait for the process that is gone


if __name__ == "__main__":
    run_and_leave(main)
