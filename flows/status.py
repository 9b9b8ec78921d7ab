"""`grpo status`: what of a run is up to date, what the pipeline would do again, and why. No torch, under a second."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from grpo_core.config import ConfigError, load_config
from grpo_core.evaluation_sections import HELD_OUT
from grpo_core.rewards.contract import RewardError
from tasks import figures
from tasks.stage import STAGES, conditions, made_at
from tasks.storage import UnknownRunError, find_run

COLOURS = {"up to date": "green", "stale": "yellow", "missing": "dim"}


def status(run: Annotated[str, typer.Argument(help="name of a run")]) -> None:
    """Show which stages of a run are up to date. Exit status 0: all are, 1: not all, 2: no such run."""
    try:
        complete = show_status(find_run(run))
    except (UnknownRunError, ConfigError, RewardError) as error:
        Console(stderr=True).print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(2) from None
    if not complete:
        raise typer.Exit(1)


def show_status(folder: Path) -> bool:
    """Print the table; whether every stage is up to date."""
    now, metric = conditions(folder), load_config(folder / "config.toml").promotion.metric
    table = Table("stage", "condition", "because", "made", "figure", title=f"run {folder.name}")
    for stage in STAGES:
        condition, receipt = now[stage.name], stage.read_receipt(folder)
        made = figure = ""
        if receipt:
            made = f"{datetime.fromtimestamp(made_at(stage, folder)):%Y-%m-%d %H:%M}"
            figure = _key_figure(stage.name, receipt, metric)
        table.add_row(stage.name, condition.state, condition.reason, made, figure, style=COLOURS[condition.state])
    Console().print(table)
    return all(condition.is_up_to_date for condition in now.values())


def _key_figure(stage: str, receipt: Mapping[str, Any], metric: str) -> str:
    match stage:
        case "validate":
            counts = receipt["num_prompts"]
            return f"{counts['train']:,} + {counts['eval']:,} prompts"
        case "plan":
            return f"{receipt['plan']['max_steps']:,} updates planned"
        case "train":
            return f"{receipt['counted']['updates']:,} updates"
        case "evaluate":
            found = receipt["sets"][HELD_OUT]["differences"]["base"][metric]
            return f"{metric} {figures.gain(metric, found)} {figures.interval(metric, found)}"
        case _:
            return f"{receipt['model_name']} version {receipt['version']}"
