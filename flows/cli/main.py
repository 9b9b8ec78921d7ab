"""The command line `grpo`: one file per command in this folder; here they are put together.

Heavy libraries are imported by the command that needs them.
"""

from __future__ import annotations

from importlib import metadata
from typing import Annotated

import typer

from flows.cli import data, env, rewards
from flows.cli.clean import clean
from flows.cli.compare import compare
from flows.cli.init import init, keys
from flows.cli.plan import plan
from flows.cli.promotion import promote, rollback
from flows.cli.rollouts import rollouts
from flows.cli.run import run, stage
from flows.cli.schedule import schedule
from flows.cli.serve import serve, serve_model, worker
from flows.cli.status import status
from flows.cli.sweep import sweep
from flows.cli.terminal import Commands
from flows.cli.up import up
from grpo_core.system.processes import run_and_leave

app = typer.Typer(
    cls=Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None
)
for command in (
    init,
    plan,
    run,
    sweep,
    schedule,
    stage,
    status,
    rollouts,
    compare,
    promote,
    rollback,
    clean,
    keys,
    up,
    serve,
    serve_model,
    worker,
):
    app.command()(command)
app.add_typer(data.app, name="data")
app.add_typer(rewards.app, name="rewards")
app.add_typer(env.app, name="env")


@app.callback(invoke_without_command=True)
def grpo(version: Annotated[bool, typer.Option("--version", help="print the version and exit")] = False) -> None:
    """GRPO training as a workflow: from a prompt dataset and a base model to a registered, evaluated policy."""
    if version:
        typer.echo(f"grpo-flows {metadata.version('grpo-flows')}")
        raise typer.Exit


def main() -> None:
    run_and_leave(app)


if __name__ == "__main__":
    main()
