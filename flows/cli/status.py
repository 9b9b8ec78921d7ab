"""`grpo status`: show which stages of a run are up to date and why the others are not; without a name, list the runs.
Imports neither torch nor Prefect."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from heapq import nlargest
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from flows.cli.terminal import Terminal, say
from grpo_core import run_files
from grpo_core.config.run import RunConfig
from grpo_core.errors import ConfigError
from grpo_core.system.progress import RANKS, Record, read_records
from tasks.processes.stacks import HANG
from tasks.stages.condition import conditions, made_at
from tasks.stages.run_directory import find_run, find_runs, read_config, storage_root
from tasks.stages.table import ALL_STAGES, EVALUATE, STAGES, Receipt, Stage, stages_of

WHEN = "%Y-%m-%d %H:%M"
SHOWN = 4  # processes named per phase
LISTED = 100  # runs
COLOURS = {"up to date": "green", "stale": "yellow", "missing": "dim"}


def status(run: Annotated[str | None, typer.Argument(help="name of a run; default: list the runs")] = None) -> None:
    """List the runs, or show which stages of one are up to date. Exit status 0: all are, 1: not all, 2: no such run."""
    if run is None:
        list_runs()
    elif not show_status(find_run(run)):
        raise typer.Exit(1)


def list_runs() -> None:
    """Print a table of the most recent runs, the last first. A stage shown as done may be stale, which only the run's
    own status tells."""
    folders = [*find_runs().values()]
    if not folders:
        say(f"no runs in {storage_root()} yet; `grpo run CONFIG` makes one")
        return
    # Reading the receipts of thousands of runs takes long; reading their files' times does not.
    runs = [(folder, _done(folder)) for folder in nlargest(LISTED, folders, key=_written)]
    table = Table("run", "stages done", "last", "figure", title=f"runs in {storage_root()}")
    for folder, done in sorted(runs, key=lambda it: _last(*it), reverse=True):
        stages = "all" if all(stage.name in done for stage in STAGES) else ", ".join(done) or "none"
        last = datetime.fromtimestamp(_last(folder, done))
        table.add_row(folder.name, stages, f"{last:{WHEN}}", _figure(folder, done))
    Terminal().print(table)
    if others := len(folders) - len(runs):
        say(f"and {others:,} whose files are older; `grpo status NAME` shows one")


def _done(folder: Path) -> dict[str, dict[str, Any]]:
    """Receipts of the stages that are done, by stage."""
    return {stage.name: receipt for stage in ALL_STAGES if (receipt := stage.read_receipt(folder))}


def _written(folder: Path) -> float:
    """Time at which the configuration or a stage's receipt was last written."""
    paths = [folder / run_files.CONFIG, *(stage.receipt_path(folder) for stage in ALL_STAGES)]
    return max(path.stat().st_mtime for path in paths if path.exists())


def _last(folder: Path, done: Mapping[str, Any]) -> float:
    """Time at which the last stage was done; if none is, time at which the run was started."""
    made = [made_at(stage, folder) for stage in ALL_STAGES if stage.name in done]
    return max(made, default=(folder / run_files.CONFIG).stat().st_mtime)


def _figure(folder: Path, done: Mapping[str, dict[str, Any]]) -> str:
    """The evaluation's key figure; "" without an evaluation."""
    if EVALUATE.name not in done:
        return ""
    try:
        config = read_config(folder)
    except ConfigError:  # written by another version of this project
        return ""
    return _key_figure(EVALUATE, config, done[EVALUATE.name])


def _key_figure(stage: Stage, config: RunConfig, receipt: Receipt) -> str:
    """The stage's figure. A receipt that is damaged or was written by another version may lack it."""
    try:
        return stage.key_figure(config, receipt)
    except (KeyError, TypeError, ValueError):
        return f"not in {Path(stage.output, stage.receipt)}"


def progress_line(stage: Stage, ranks: Path, now: float) -> str:
    """Describe what a stage's processes are doing and on which machines, or why they were ended; "" if neither is
    known."""
    records = read_records(ranks)
    if not records:
        reason = (ranks / HANG).read_text() if (ranks / HANG).exists() else ""
        return f"{stage.name} was ended, since it hung: {reason}" if reason else ""
    machines = dict.fromkeys(record.machine or record.host for record in records)
    phases: dict[str, list[Record]] = {}
    for record in [record for record in records if not record.waits] or records:
        phases.setdefault(record.doing, []).append(record)
    doing = [
        f"{phase} since {datetime.fromtimestamp(max(record.since for record in those)):%H:%M:%S}"
        + _ranks_in_brackets(those, len(records))
        for phase, those in phases.items()
    ]
    moved = f"moved {now - max(record.moved for record in records):.0f} s ago"
    return f"{stage.name} runs on {', '.join(machines)}: {'; '.join(doing)}; {moved}"


def _ranks_in_brackets(records: Sequence[Record], processes: int) -> str:
    """Ranks of these processes, in brackets; "" if the stage has only one process."""
    numbers = [str(record.rank) for record in records[:SHOWN]] + ["…"] * (len(records) > SHOWN)
    return f" (rank {', '.join(numbers)})" if processes > 1 else ""


def show_status(folder: Path) -> bool:
    """Print the table of a run's stages; returns whether every stage is up to date."""
    config = read_config(folder)
    now = conditions(folder, config)
    table = Table("stage", "condition", "because", "made", "figure", title=f"run {folder.name}")
    for stage in stages_of(config):
        condition, receipt = now[stage.name], stage.read_receipt(folder)
        made = figure = ""
        if receipt:
            made = f"{datetime.fromtimestamp(made_at(stage, folder)):{WHEN}}"
            figure = _key_figure(stage, config, receipt)
        table.add_row(stage.name, condition.state, condition.reason, made, figure, style=COLOURS[condition.state])
    Terminal().print(table)
    for stage in stages_of(config):
        ranks = stage.partial(folder) / RANKS
        if not now[stage.name].is_up_to_date and (line := progress_line(stage, ranks, time.time())):
            say(line)
    return all(condition.is_up_to_date for condition in now.values())
