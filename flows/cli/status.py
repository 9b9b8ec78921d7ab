"""`grpo status`: what of a run is up to date, what the pipeline would do again, and why; without a name, the runs.
Imports neither torch nor Prefect."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from flows.cli.terminal import say
from grpo_core.config.evaluation import HELD_OUT
from grpo_core.config.files import load_config
from grpo_core.config.run import RunConfig
from grpo_core.errors import ConfigError, RewardError
from tasks.rendering import figures
from tasks.stages.run_directory import UnknownRunError, find_run, find_runs, storage_root
from tasks.stages.stage import EVALUATE, STAGES, conditions, made_at

WHEN = "%Y-%m-%d %H:%M"
COLOURS = {"up to date": "green", "stale": "yellow", "missing": "dim"}


def status(run: Annotated[str | None, typer.Argument(help="name of a run; default: list the runs")] = None) -> None:
    """List the runs, or show which stages of one are up to date. Exit status 0: all are, 1: not all, 2: no such run."""
    if run is None:
        list_runs()
        return
    try:
        complete = show_status(find_run(run))
    except (UnknownRunError, ConfigError, RewardError) as error:
        Console(stderr=True).print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(2) from None
    if not complete:
        raise typer.Exit(1)


def list_runs() -> None:
    """Print a table of the runs, the one worked on last first. What is done may be stale, which only a run's own status
    looks into."""
    runs = [(folder, _done(folder)) for folder in find_runs().values()]
    if not runs:
        say(f"no runs in {storage_root()} yet; `grpo run CONFIG` makes one")
        return
    table = Table("run", "stages done", "last", "figure", title=f"runs in {storage_root()}")
    for folder, done in sorted(runs, key=lambda it: _last(*it), reverse=True):
        stages = "all" if len(done) == len(STAGES) else ", ".join(done) or "none"
        last = datetime.fromtimestamp(_last(folder, done))
        table.add_row(folder.name, stages, f"{last:{WHEN}}", _figure(folder, done))
    Console().print(table)


def _done(folder: Path) -> dict[str, dict[str, Any]]:
    """The receipts of the stages that have been done, by stage."""
    return {stage.name: receipt for stage in STAGES if (receipt := stage.read_receipt(folder))}


def _last(folder: Path, done: Mapping[str, Any]) -> float:
    """When the last stage was done, else when the run was started."""
    made = [made_at(stage, folder) for stage in STAGES if stage.name in done]
    return max(made, default=(folder / "config.toml").stat().st_mtime)


def _figure(folder: Path, done: Mapping[str, dict[str, Any]]) -> str:
    """The figure that decides on the run, where it has been evaluated."""
    if EVALUATE.name not in done:
        return ""
    try:
        config = load_config(folder / "config.toml")
    except ConfigError:  # of another version of this project
        return ""
    return _key_figure(EVALUATE.name, done[EVALUATE.name], config)


def show_status(folder: Path) -> bool:
    """Print the table; whether every stage is up to date."""
    now, config = conditions(folder), load_config(folder / "config.toml")
    table = Table("stage", "condition", "because", "made", "figure", title=f"run {folder.name}")
    for stage in STAGES:
        condition, receipt = now[stage.name], stage.read_receipt(folder)
        made = figure = ""
        if receipt:
            made = f"{datetime.fromtimestamp(made_at(stage, folder)):{WHEN}}"
            figure = _key_figure(stage.name, receipt, config)
        table.add_row(stage.name, condition.state, condition.reason, made, figure, style=COLOURS[condition.state])
    Console().print(table)
    return all(condition.is_up_to_date for condition in now.values())


def _key_figure(stage: str, receipt: Mapping[str, Any], config: RunConfig) -> str:
    match stage:
        case "validate":
            counts = receipt["num_prompts"]
            return f"{counts['train']:,} + {counts['eval']:,} prompts"
        case "plan":
            return f"{receipt['plan']['max_steps']:,} updates planned"
        case "train":
            return f"{receipt['counted']['updates']:,} updates"
        case "evaluate":
            metric = figures.metric_of(config, receipt)
            found = receipt["sets"][HELD_OUT]["differences"]["base"][metric]
            return f"{metric} {figures.gain(metric, found)} {figures.interval(metric, found)}"
        case _:
            return f"{receipt['model_name']} version {receipt['version']}"
