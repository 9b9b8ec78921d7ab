"""`grpo serve`: offers what Prefect's UI triggers, and runs it here. `grpo worker`: runs the triggered flows of a work
pool. `flows.cli.up` has `grpo up`, which starts the servers too."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from flows.cli.terminal import refuse
from flows.serving.environment import configure
from flows.serving.local_server import find_api_to_serve
from flows.serving.running import ServerError
from grpo_core.system.processes import importing

ENDING_SECONDS = 28  # that flow runs get when serving ends: a training takes 20 at most, and is to be gone in 30


def serve() -> None:
    """Offer the pipeline and each stage in Prefect's UI, and run here what is triggered there, until Ctrl-C."""
    _set_up()
    _supervised("flows.serving.deployments")


def worker(
    pool: Annotated[str, typer.Argument(help="the work pool, as in prefect.yaml")],
    limit: Annotated[int | None, typer.Option(help="flow runs at once; default: no limit")] = None,
) -> None:
    """Run the flow runs of a work pool of type process here, until Ctrl-C."""
    _set_up()
    at_once = ["--limit", str(limit)] if limit else []
    _supervised("prefect", "worker", "start", "--pool", pool, "--type", "process", *at_once)


def _set_up() -> None:
    configure()
    try:
        os.environ["PREFECT_API_URL"] = find_api_to_serve()
        with importing():
            from flows.serving.server_setup import password_asked_for, set_up

        with password_asked_for():
            set_up()
    except ServerError as error:
        refuse(str(error))


def _supervised(*command: str) -> None:
    """Become a process that runs `python -m COMMAND` and ends the flow runs with it. Prefect's own runner and worker
    leave those alone when they are told to end."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # a pipe there would be watched
    supervisor = [
        sys.executable,
        "-m",
        "tasks.processes.supervise",
        str(ENDING_SECONDS),
        sys.executable,
        "-m",
        *command,
    ]
    os.execv(sys.executable, supervisor)
