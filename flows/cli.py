"""The command line: `grpo init`, `run`, `stage`, `status`, `compare`, `promote`, `rollback`, `plan`, `keys`, `rewards`,
`up`, `serve`, `worker`.

Heavy libraries are imported by the command that needs them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal, NoReturn

import typer
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from flows import rewards
from flows.compare import compare
from flows.early import refuse_early
from flows.environment import TAG, configure
from flows.planning import plan
from flows.project import init
from flows.server import prefect_api
from flows.serving import serve, up, worker
from flows.status import show_status, status
from grpo_core.config import ConfigError, RunConfig, describe_keys, load_config, read_overrides
from grpo_core.errors import GrpoError
from grpo_core.evaluation_sections import RegistryConfig
from tasks.stage import EVALUATE, REGISTER, STAGES, TRAIN, Interrupted, refuse_outdated_inputs
from tasks.storage import find_run

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
app.command()(init)
app.command()(plan)
app.command()(up)
app.command()(serve)
app.command()(worker)
app.command()(status)
app.command()(compare)
app.add_typer(rewards.app, name="rewards")
console = Console()

ConfigFile = Annotated[Path, typer.Argument(help="run configuration (TOML), such as configs/quickstart.toml")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="override one key, such as train.max_steps=50")
]

RegisteredModel = Annotated[str, typer.Argument(help="name of a registered model in MLflow")]


@app.command()
def run(config: ConfigFile, overrides: Overrides = None) -> None:
    """Run the pipeline here: validate, plan, train, evaluate, register. Finished stages are skipped."""
    resolved = _load(config, overrides)
    with _refusals(2, resolved.name):
        refuse_early(resolved)
    configure()
    start = time.monotonic()
    with prefect_api() as url:
        console.print(f"Prefect's UI while this runs: {url.removesuffix('/api')}", highlight=False)
        from prefect import tags

        from flows.form import changes_of
        from flows.pipeline import pipeline

    with _refusals(1, resolved.name), tags(TAG):
        folder = pipeline(str(config), changes_of(config, overrides))
    _summary(folder, resolved.promotion.metric, time.monotonic() - start)


@app.command()
def stage(
    name: Annotated[Literal["validate", "plan", "train", "evaluate", "register"], typer.Argument(help="the stage")],
    run: Annotated[str, typer.Option(help="name of an earlier run")],
    force: Annotated[bool, typer.Option("--force", help="though it is up to date; train: again from step 0")] = False,
) -> None:
    """Run one stage of an earlier run by its own configuration; refused when what it reads is missing or outdated."""
    with _refusals(2):
        folder = find_run(run)
    with _refusals(1):
        refuse_outdated_inputs(next(it for it in STAGES if it.name == name), folder, force)
    configure()
    with prefect_api():
        from prefect import tags

        from flows import stages

    with _refusals(1, run), tags(TAG):
        getattr(stages, f"{name}_run")(run, force)
    show_status(folder)


@app.command()
def promote(
    model: RegisteredModel,
    version: Annotated[str, typer.Option(help="number of the version, or an alias of it")] = RegistryConfig().alias,
    force: Annotated[bool, typer.Option("--force", help="whatever the gate says; the version's tags keep it")] = False,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="a rule, such as promotion.confidence=0.9")
    ] = None,
) -> None:
    """Make a version the champion if it is better than the present one. Exit status 1: refused, 2: cannot be tried."""
    configure()
    _check_registered(model, version)
    with prefect_api():
        from prefect import tags

        from flows import promotion

    with _refusals(2, model), tags(TAG):
        outcome = promotion.promote(model, version, force, read_overrides(overrides))
    text = f"{model} version {outcome.version}: {outcome.decision}: {outcome.reason}"
    if outcome.decision == "refused":
        _fail(text, code=1)
    console.print(text, markup=False, highlight=False, soft_wrap=True)


@app.command()
def rollback(model: RegisteredModel) -> None:
    """Make the previous champion of a registered model champion again. Exit status 2: there is none."""
    configure()
    _check_registered(model)
    with prefect_api():
        from prefect import tags

        from flows import promotion

    with _refusals(2), tags(TAG):
        text = promotion.rollback(model)
    console.print(text, markup=False, highlight=False, soft_wrap=True)


@app.command()
def keys() -> None:
    """List every configuration key: default, bounds or choices, meaning."""
    for key, default, accepts, meaning in describe_keys():
        console.print(f"{key} = {default or '(none)'}   [{accepts}]", style="bold", markup=False, highlight=False)
        console.print(Padding(Text(meaning), (0, 0, 0, 4)))


def _load(path: Path, overrides: list[str] | None) -> RunConfig:
    try:
        return load_config(path, overrides)
    except ConfigError as error:
        _fail(f"{path}: not a valid configuration\n{error}", code=2)


def _check_registered(model: str, version: str | None = None) -> None:
    """Before Prefect, which takes its time."""
    from tasks.champion import check

    with _refusals(2):
        check(model, version)


@contextmanager
def _refusals(code: int, name: str = "") -> Iterator[None]:
    """End the command with one sentence, after the name of what it is about, at a foreseen error of the body. Exit
    status: `code`, or 130 if the body was interrupted."""
    try:
        yield
    except GrpoError as error:
        _fail(f"{name}: {error}" if name else str(error), 130 if isinstance(error, Interrupted) else code)


def _fail(message: str, code: int) -> NoReturn:
    Console(stderr=True).print(message, style="red", markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(code)


def _summary(folder: Path, metric: str, seconds: float) -> None:
    """What happened and where to look."""
    from tasks.evaluate import rows_of, verdicts
    from tasks.report import PAGE

    report, training, registration = (stage.read_receipt(folder) for stage in (EVALUATE, TRAIN, REGISTER))
    counted = training["counted"]
    drawn = f"temperature {report['temperature']:g}" if report["temperature"] else "greedy"
    for name, figures in report["sets"].items():
        head, *rows = rows_of(figures)
        table = Table(*head, title=f"{name}: {figures['num_prompts']:,} prompts, {drawn}")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    console.print(
        "\n".join(f"{sentence}." for sentence in verdicts(report, metric)) + "\n"
        f"{counted['updates']} of {training['planned']['updates']} planned updates, "
        f"{counted['completions']:,} completions; pipeline took {seconds:.0f} s\n"
        f"registered  {registration['model_name']} version {registration['version']}, "
        f"alias {registration['alias']}\n"
        f"run         {folder}\n"
        f"report      {EVALUATE.path(folder) / PAGE}\n"
        "look at it  make ui: http://127.0.0.1:4200 (Prefect), http://127.0.0.1:5000 (MLflow)",
        soft_wrap=True,
        highlight=False,
    )


if __name__ == "__main__":
    app()
