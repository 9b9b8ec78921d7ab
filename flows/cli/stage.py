"""`grpo stage`: one stage of an earlier run."""

from __future__ import annotations

from typing import Annotated

import typer

from flows.cli.status import show_status
from flows.cli.terminal import refusals, say
from flows.serving.environment import TAG, configure
from flows.serving.find_server import server_for_command
from grpo_core.system.processes import importing
from tasks.stages.condition import conditions, refuse_outdated_inputs
from tasks.stages.locks import locked
from tasks.stages.run_directory import find_run, read_config
from tasks.stages.table import ALL_STAGES

BY_NAME = {stage.name: stage for stage in ALL_STAGES}


def _known(name: str) -> str:
    if name not in BY_NAME:
        raise typer.BadParameter(f"{name!r} is not one of {', '.join(BY_NAME)}.")
    return name


def stage(
    name: Annotated[str, typer.Argument(callback=_known, metavar="STAGE", help=f"one of {', '.join(BY_NAME)}")],
    run: Annotated[str, typer.Option(help="name of an earlier run")],
    force: Annotated[
        bool, typer.Option("--force", help="even if it is up to date; an interrupted training goes on")
    ] = False,
) -> None:
    """Run one stage of an earlier run with that run's own configuration. Refused if its input is missing or outdated.

    Exit status 1: the stage failed or was refused, 2: no such run, 130: Ctrl-C, 143: SIGTERM.
    """
    folder = find_run(run)
    config = read_config(folder)
    refuse_outdated_inputs(BY_NAME[name], folder, config, conditions(folder, config), force)
    with locked(folder):
        pass  # a run in use is refused before a server is started
    configure()
    with server_for_command():
        say(f"Stage {name} of run {run} starts")
        with importing():
            from prefect import tags

            from flows.serving.server_setup import prefect_answering
            from flows.stages import FLOWS

    with refusals(run, started=True), prefect_answering(), tags(TAG):
        FLOWS[name](run, force)
    show_status(folder)
