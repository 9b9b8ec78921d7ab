"""`grpo serve`: offer the flows in Prefect's UI, and run here what is triggered there. `grpo worker`: run here what is
triggered in a work pool. (`grpo up` starts the servers too.)"""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from flows.serving.environment import configure
from flows.serving.find_server import find_api_to_serve
from grpo_core.system.processes import importing

ENDING_SECONDS = 28  # given to flow runs when serving ends: a training takes at most 20, and has to end within 30


def serve() -> None:
    """Offer the pipeline and each stage in Prefect's UI, and run here what is triggered there, until Ctrl-C."""
    _set_up()
    _exec_supervised("flows.serving.runner")


def worker(
    pool: Annotated[str, typer.Argument(help="the work pool, as in prefect.yaml")],
    limit: Annotated[int | None, typer.Option(min=1, help="concurrent flow runs; default: no limit")] = None,
) -> None:
    """Run the flow runs of a work pool of type process here, until Ctrl-C."""
    _set_up()
    most = ["--limit", str(limit)] if limit else []
    _exec_supervised("flows.serving.worker", "worker", "start", "--pool", pool, "--type", "process", *most)


def _set_up() -> None:
    configure()
    os.environ["PREFECT_API_URL"] = find_api_to_serve()
    with importing():
        from flows.serving.server_setup import prefect_answering, set_up

    with prefect_answering():
        set_up()


def _exec_supervised(*command: str) -> None:
    """Replace this process by a supervisor that runs `python -m COMMAND`, and tells the flow runs to end before the
    command: Prefect's own runner and worker leave them running, or kill them."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # the supervisor would watch a pipe there
    supervisor = [
        sys.executable,
        "-m",
        "tasks.processes.supervise",
        "--children-first",
        str(ENDING_SECONDS),
        sys.executable,
        "-m",
        *command,
    ]
    os.execv(sys.executable, supervisor)
