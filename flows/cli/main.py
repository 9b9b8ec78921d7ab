"""The command line: `grpo init`, `run`, `stage`, `status`, `compare`, `promote`, `rollback`, `plan`, `keys`, `rewards`,
`up`, `serve`, `worker`.

Heavy libraries are imported by the command that needs them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from flows.cli import rewards
from flows.cli.compare import compare
from flows.cli.init import init
from flows.cli.plan import plan
from flows.cli.serve import serve, worker
from flows.cli.status import show_status, status
from flows.cli.terminal import refuse, say
from flows.cli.up import up
from flows.serving.environment import TAG, configure
from flows.serving.local_server import find_api, prefect_api
from flows.serving.running import find_up
from grpo_core.config.evaluation import RegistryConfig
from grpo_core.config.files import describe_keys, load_config, read_overrides
from grpo_core.config.run import RunConfig
from grpo_core.errors import ConfigError, GrpoError
from grpo_core.system.processes import importing, run_and_leave
from tasks.stages.run_directory import find_run, locked, storage_root
from tasks.stages.stage import EVALUATE, REGISTER, STAGES, TRAIN, Interrupted, refuse_outdated_inputs

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

RegisteredModel = Annotated[str, typer.Argument(help="name of a registered model, or of a run that registered one")]


@app.callback(invoke_without_command=True)
def grpo(version: Annotated[bool, typer.Option("--version", help="print the version and exit")] = False) -> None:
    """GRPO training as a workflow: from a prompt dataset and a base model to a registered, evaluated policy."""
    if version:
        typer.echo(f"grpo-flows {metadata.version('grpo-flows')}")
        raise typer.Exit


@app.command()
def run(config: ConfigFile, overrides: Overrides = None) -> None:
    """Run the pipeline here: validate, plan, train, evaluate, register. Finished stages are skipped."""
    resolved = _load(config, overrides)
    from flows.parameters.early import refuse_early

    with _refusals(2, resolved.name):
        refuse_early(resolved)
    configure()
    if (folder := storage_root() / "runs" / resolved.name).is_dir():
        with _refusals(1, resolved.name), locked(folder):
            pass  # another process that works there is named before a server is started
    start = time.monotonic()
    with _prefect() as url:
        page = url.removesuffix("/api")
        say(f"Run {resolved.name} starts; Prefect's UI, in some seconds and while this runs: {page}")
        with importing():
            from prefect import tags

            from flows.parameters.form import changes_of
            from flows.pipeline import pipeline

    with _refusals(1, resolved.name), tags(TAG):
        folder = pipeline(str(config), changes_of(config, overrides))
    _summary(folder, resolved, time.monotonic() - start)


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
    with _prefect():
        say(f"Stage {name} of run {run} starts")
        with importing():
            from prefect import tags

            from flows import stages

    with _refusals(1, run), tags(TAG):
        getattr(stages, f"{name}_run")(run, force)
    show_status(folder)


@app.command()
def promote(
    model: RegisteredModel,
    version: Annotated[
        str | None, typer.Option(help="its number or an alias; default: the newest, or the run's", show_default=False)
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="whatever the gate says; the version's tags keep it")] = False,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="a rule, such as promotion.confidence=0.9")
    ] = None,
) -> None:
    """Make a version the champion if it is better than the present one. Exit status 1: refused, 2: cannot be tried."""
    configure()
    model, registered = _find_model(model)
    version = version or registered or RegistryConfig().alias
    _check_registered(model, version)
    from tasks.registry import champion
    from tasks.tracking.runs import answering

    with _refusals(2, model):
        changes = read_overrides(overrides)
        if _has_server():
            from prefect import tags

            from flows import promotion

            with tags(TAG):
                outcome = promotion.promote(model, version, force, changes)
        else:
            with answering():
                outcome = champion.promote(model, version, force, changes)
    text = f"{model} version {outcome.version}: {outcome.decision}: {outcome.reason}"
    if outcome.decision == "refused":
        refuse(text, code=1)
    console.print(text, markup=False, highlight=False, soft_wrap=True)


@app.command()
def rollback(model: RegisteredModel) -> None:
    """Make the previous champion of a registered model champion again. Exit status 2: there is none."""
    configure()
    model, _ = _find_model(model)
    from tasks.registry import champion
    from tasks.tracking.runs import answering

    with _refusals(2):
        if _has_server():
            from prefect import tags

            from flows import promotion

            with tags(TAG):
                text = promotion.rollback(model)
        else:
            with answering():
                text = champion.describe_rollback(model, *champion.rollback(model))
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
        unread = str(error).startswith(f"{path}: ")
        refuse(str(error) if unread else f"{path}: not a valid configuration\n{error}", code=2)


def _find_model(name: str) -> tuple[str, str | None]:
    """The registered model of this name; else the one that the run of this name has registered, and the version."""
    with importing():
        from tasks.registry.champion import PromotionError, check

    try:
        check(name)
    except PromotionError as error:
        if registered := REGISTER.read_receipt(storage_root() / "runs" / name):
            return registered["model_name"], registered["version"]
        refuse(f"{error}, and no run of this name has registered one; `grpo run CONFIG` does", code=2)
    return name, None


@contextmanager
def _prefect() -> Iterator[str]:
    """The URL of Prefect's API, as `prefect_api` gives it. After the body, the server has the limit of one training at
    a time. Ends the command if there is no server to work with."""
    with _refusals(2):
        with prefect_api() as url:
            yield url
        from flows.serving.server_setup import ensure_training_limit, password_asked_for

        with password_asked_for():
            ensure_training_limit()


def _has_server() -> bool:
    """Whether a Prefect server runs for this storage, which then records what is done as a flow run and tells its
    automations; the log of that goes there alone."""
    with _refusals(2):
        if (api := find_api()) is None:
            return False
        os.environ["PREFECT_API_URL"] = api
        os.environ["PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL"] = "CRITICAL"
        from flows.serving.server_setup import check_access

        check_access()
    return True


def _check_registered(model: str, version: str) -> None:
    """Before Prefect, which takes its time."""
    from tasks.registry.champion import check

    with _refusals(2):
        check(model, version)


@contextmanager
def _refusals(code: int, name: str = "") -> Iterator[None]:
    """End the command with one sentence, after the name of what it is about, at a foreseen error of the body. Exit
    status: `code`, or 130 if the body was interrupted."""
    try:
        yield
    except GrpoError as error:
        refuse(f"{name}: {error}" if name else str(error), 130 if isinstance(error, Interrupted) else code)


def _summary(folder: Path, config: RunConfig, seconds: float) -> None:
    """What happened and where to look."""
    from tasks.evaluate import rows_of, verdicts
    from tasks.rendering.figures import metric_of
    from tasks.reports.account import stage_times
    from tasks.reports.record import read_record
    from tasks.reports.report import PAGE

    report, training, registration = (stage.read_receipt(folder) for stage in (EVALUATE, TRAIN, REGISTER))
    counted = training["counted"]
    up = find_up()
    where = f"{up.prefect_url} (Prefect), {up.mlflow_url} (MLflow)" if up else "grpo up   (serves Prefect and MLflow)"
    drawn = f"temperature {report['temperature']:g}" if report["temperature"] else "greedy"
    for name, figures in report["sets"].items():
        head, *rows = rows_of(figures)
        table = Table(*head, title=f"{name}: {figures['num_prompts']:,} prompts, {drawn}")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    timed = stage_times(read_record(folder), report["seconds"])
    timed.append((REGISTER.name, registration["seconds"]))
    if (rest := seconds - sum(value for _, value in timed)) >= 0:  # else a stage was skipped
        table = Table("stage", "seconds", title="Where the time went")
        for name, value in [("start of command and Prefect", rest), *timed]:
            table.add_row(name, f"{value:.1f}")
        console.print(table)
    console.print(
        "\n".join(f"{sentence}." for sentence in verdicts(report, metric_of(config, report))) + "\n"
        f"{counted['updates']} of {training['planned']['updates']} planned updates, "
        f"{counted['completions']:,} completions; pipeline took {seconds:.0f} s\n"
        f"registered  {registration['model_name']} version {registration['version']}, "
        f"alias {registration['alias']}\n"
        f"run         {folder}\n"
        f"report      {EVALUATE.path(folder) / PAGE}\n"
        f"look at it  {where}",
        soft_wrap=True,
        highlight=False,
    )


def main() -> None:
    run_and_leave(app)


if __name__ == "__main__":
    main()
