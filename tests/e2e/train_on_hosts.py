"""`python -m tests.e2e.train_on_hosts RUN`: what the stage train does with a run's processes, without Prefect."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from grpo_core.config.files import load_config
from tasks.processes.training import run_training
from tasks.processes.vllm_servers import servers
from tasks.stages.run import Context


def say(line: str) -> None:
    print(line, flush=True)


def main() -> None:
    run = Path(sys.argv[1])
    logging.basicConfig(stream=sys.stdout, format="%(message)s")
    context = Context(load_config(run / "config.toml"), run, run / "training")
    context.partial.mkdir(exist_ok=True)
    log = logging.getLogger("stage")
    log.setLevel(logging.INFO)
    with servers(context, log) as addresses:
        run_training(context, say, addresses, log)


if __name__ == "__main__":
    main()
