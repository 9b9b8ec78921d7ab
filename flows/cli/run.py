"""`grpo run`: run the pipeline in this process, and print a summary of the results. `grpo stage`: one stage of an
earlier run."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from flows.cli.status import show_status
from flows.cli.terminal import Terminal, refusals, refuse, say, set_option, table_of
from flows.serving.environment import TAG, configure
from flows.serving.find_server import server_for_command
from flows.serving.up_file import find_up
from grpo_core.config.files import load_config
from grpo_core.config.run import RunConfig
from grpo_core.errors import ConfigError
from grpo_core.system.processes import importing
from tasks.stages.condition import conditions, refuse_outdated_inputs
from tasks.stages.locks import locked
from tasks.stages.run_directory import find_run, read_config, run_folder
from tasks.stages.table import ALL_STAGES, EVALUATE, PUBLISH, REGISTER, TRAIN, VALIDATE, stages_of

BY_NAME = {stage.name: stage for stage in ALL_STAGES}


def run(
    config: Annotated[Path, typer.Argument(help="run configuration (TOML), such as configs/quickstart.toml")],
    overrides: Annotated[list[str] | None, set_option("override one key, such as train.max_steps=50")] = None,
) -> None:
    """Run the pipeline here, stage after stage. Stages that are up to date are skipped.

    Exit status 1: a stage failed, 2: refused before anything was started, 130: Ctrl-C, 143: SIGTERM.
    """
    resolved = _load(config, overrides)
    from flows.parameters.early_refusals import refuse_early

    with refusals(resolved.name):
        refuse_early(resolved)
    configure()
    with refusals(resolved.name):
        if (folder := run_folder(resolved.name)).is_dir():
            with locked(folder):
                pass  # a run in use is refused before a server is started
    start = time.monotonic()
    with server_for_command() as url:
        page = url.removesuffix("/api")
        say(f"Run {resolved.name} starts. Prefect's UI, in a few seconds and as long as this runs: {page}")
        with importing():
            from prefect import tags

            from flows.parameters.form import changes_from_overrides
            from flows.pipeline import make_pipeline
            from flows.serving.server_setup import prefect_answering

            if not VALIDATE.path(folder).exists():
                from transformers import AutoTokenizer  # noqa: F401  slow; what validate begins with

    with refusals(resolved.name, started=True), prefect_answering(), tags(TAG):
        folder = make_pipeline(resolved)(str(config), changes_from_overrides(config, overrides))
    _summary(folder, resolved, time.monotonic() - start)


def _load(path: Path, overrides: list[str] | None) -> RunConfig:
    try:
        return load_config(path, overrides)
    except ConfigError as error:
        if str(error).startswith(f"{path}: "):
            refuse(str(error))
        given = " ".join([str(path), *(f"--set {override}" for override in overrides or ())])
        refuse(f"{given}: not a valid configuration\n{error}")


def _summary(folder: Path, config: RunConfig, seconds: float) -> None:
    """Print what happened and where to look."""
    from tasks.rendering.figures import metric_of
    from tasks.reports.record import read_record
    from tasks.reports.report import PAGE, rows_of, verdicts
    from tasks.reports.training_sections import stage_times

    terminal = Terminal()
    report, training, registration = (stage.read_receipt(folder) for stage in (EVALUATE, TRAIN, REGISTER))
    counted = training["counted"]
    up = find_up()
    where = f"{up.prefect_url} (Prefect), {up.mlflow_url} (MLflow)" if up else "grpo up   (serves Prefect and MLflow)"
    drawn = f"temperature {report['temperature']:g}" if report["temperature"] else "greedy"
    for name, figures in report["sets"].items():
        head, *rows = rows_of(figures)
        terminal.print(table_of(head, rows, f"{name}: {figures['num_prompts']:,} prompts, {drawn}"))
    record = read_record(folder, config)
    made = [stage.read_receipt(folder)["made_at"] for stage in stages_of(config)]
    if record.metrics and min(made) > time.time() - seconds:
        timed = [*stage_times(record, report["seconds"]), (REGISTER.name, registration["seconds"])]
        rest = seconds - sum(value for _, value in timed)
        shown = [(name, f"{value:.1f}") for name, value in [("start of command and Prefect", rest), *timed]]
        terminal.print(table_of(("stage", "seconds"), shown, "Where the time went"))
    exports = PUBLISH.read_receipt(folder)["exports"] if PUBLISH.is_asked(config) else {}
    published = "".join(f"published   {PUBLISH.path(folder) / made}: {it['verdict']}\n" for made, it in exports.items())
    terminal.print(
        "\n".join(f"{sentence}." for sentence in verdicts(report, metric_of(config, report))) + "\n"
        f"{counted['updates']} of {training['planned']['updates']} planned updates, "
        f"{counted['completions']:,} completions; pipeline took {seconds:.0f} s\n"
        f"registered  {registration['model_name']} version {registration['version']}, "
        f"alias {registration['alias']}\n{published}"
        f"run         {folder}\n"
        f"report      {EVALUATE.path(folder) / PAGE}\n"
        f"look at it  {where}",
        soft_wrap=True,
    )


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
