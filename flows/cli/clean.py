"""`grpo clean`: remove what old runs take on the disk and in MLflow, unless something needs it."""

from __future__ import annotations

from typing import Annotated

import typer

from flows.cli.terminal import say
from flows.serving.environment import configure
from flows.serving.find_server import server_for_command
from grpo_core.system.processes import importing


def clean(
    keep_days: Annotated[float, typer.Option(min=0, help="keep what has changed within these days")] = 30,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="only show what would be removed")] = False,
) -> None:
    """Remove old runs that nothing needs: directories, weights and traces. Their figures stay in MLflow."""
    configure()
    with server_for_command(), importing():
        from flows.serving.server_setup import prefect_answering
        from tasks import clean
        from tasks.stages.attempts import names_going_on

    with prefect_answering():
        going_on = names_going_on()
    items = []
    for item in clean.clean(keep_days, dry_run, going_on):
        items.append(item)
        say(clean.describe(item, dry_run))
    say(clean.summarize(items, keep_days, dry_run))
