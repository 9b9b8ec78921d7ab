"""Determines which stages of a run are up to date, and why the others are not. Doesn't import Prefect, to keep `grpo
status` quick."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any, Literal

from grpo_core import run_files
from grpo_core.config.files import parse_config
from grpo_core.config.run import RunConfig
from grpo_core.errors import ConfigError
from tasks.stages.dependencies import Named, hash_values
from tasks.stages.errors import StageError
from tasks.stages.files import read_json
from tasks.stages.lineage import lineage_inputs, what_changed
from tasks.stages.table import PLAN, Receipt, Stage, stages_of

MARKER = "lineage.json"  # in an unfinished output: the lineage key and inputs that it is being made from
CHANGES_NAMED = 3  # of the changes that make a stage stale


@dataclass(frozen=True)
class Condition:
    """State of a stage's output: is it what the run's configuration and inputs would give now, and if not, why?"""

    state: Literal["up to date", "stale", "missing"]
    reason: str = ""

    @property
    def is_up_to_date(self) -> bool:
        return self.state == "up to date"


def conditions(run: Path, config: RunConfig, inputs: Mapping[str, Named] | None = None) -> dict[str, Condition]:
    """Condition of each stage; the pipeline would run those that are not up to date. `inputs`: lineage inputs of all
    stages, if they are known.

    A stage is stale if its lineage key differs from that of the present configuration and inputs, or if a stage that it
    was made from has been made again since, or will be.
    """
    inputs = inputs or lineage_inputs(config)
    stages = stages_of(config)
    receipts = {stage.name: stage.read_receipt(run) for stage in stages}
    found: dict[str, Condition] = {}
    for stage in stages:
        saved, receipt = saved_progress(stage, run, hash_values(inputs[stage.name])), receipts[stage.name]
        damaged = Condition("missing", f"{stage.receipt_path(run).relative_to(run)} is damaged")
        try:
            reason = _why_stale(stage, receipt, config, inputs, receipts) or _why_soon_stale(stage, config, found)
            files = stage.files(config, receipt) if receipt else ()
            gone = [name for name in files if not (stage.path(run) / name).exists()]
        except (AttributeError, KeyError, TypeError):  # JSON, but not as the stage wrote it
            found[stage.name] = damaged
            continue
        if not receipt:
            there = stage.receipt_path(run).exists()
            found[stage.name] = damaged if there else Condition("missing", saved or "not done yet")
        elif gone and not reason:
            found[stage.name] = Condition("missing", f"{', '.join(gone)} is gone")
        elif reason:
            found[stage.name] = Condition("stale", f"{reason}; {saved}" if saved else reason)
        else:
            found[stage.name] = Condition("up to date")
    return found


def made_at(stage: Stage, run: Path) -> float:
    """Time at which the stage was done, in seconds since 1970; if its receipt does not say, that of the receipt's
    file."""
    made = stage.read_receipt(run).get("made_at")
    return made if isinstance(made, float | int) else stage.receipt_path(run).stat().st_mtime


def saved_progress(stage: Stage, run: Path, key: str) -> str:
    """Describe the saved progress of an unfinished training that the next attempt continues; "" if there is none."""
    partial = stage.partial(run)
    if not stage.resumable or read_json(partial / MARKER).get("lineage_key") != key:
        return ""
    newest = saved_updates(partial)
    try:  # a warm start has a plan of its own
        planned = (read_json(partial / run_files.PLAN) or PLAN.read_receipt(run))["plan"]["max_steps"]
    except (KeyError, TypeError):
        return ""
    return f"{newest} of {planned} updates saved" if newest else ""


def saved_updates(folder: Path) -> int:
    """Number of updates in the newest checkpoint in a training's folder; 0 without one."""
    names = (re.fullmatch(r"step-(\d+)", path.name) for path in (folder / run_files.CHECKPOINTS).glob("*"))
    return max((int(name[1]) for name in names if name), default=0)


def identity(receipt: Receipt, prompts: Collection[str]) -> Any:
    """Identity of an output; if it has one per data set, those of the data sets in `prompts`."""
    made = receipt.get("made")
    return {name: made.get(name) for name in prompts} if isinstance(made, dict) else made


def refuse_outdated_inputs(
    stage: Stage, run: Path, config: RunConfig, now: Mapping[str, Condition], force: bool = False
) -> None:
    """Raises StageError, with the commands to run first, if an input of the stage is not up to date."""
    if not stage.is_asked(config):
        raise StageError(
            f"run {run.name!r} has no stage {stage.name}: {stage.asked_by} is not set in its configuration; "
            f"{_how_to_add_stage(stage, run, config)}"
        )
    outdated = _outdated(stage, config, now)
    if not outdated or (now[stage.name].is_up_to_date and not force):
        return
    lines = [
        f"  grpo stage {read.name} --run {run.name}    # {now[read.name].state}: {now[read.name].reason}"
        for read in stages_of(config)
        if read in outdated
    ]
    raise StageError(
        f"{stage.name} of run {run.name!r} would work on outdated input; first run, in this order:\n"
        + "\n".join(lines)
        + f"\nor everything that is not up to date: grpo run {run / run_files.CONFIG}"
    )


def _how_to_add_stage(stage: Stage, run: Path, config: RunConfig) -> str:
    """Return the command that adds a stage to a run whose configuration does not ask for it, or why that is
    impossible."""
    from grpo_core.rewards.composition import check_curriculum  # imports numpy, which most commands do without

    values = config.model_dump(mode="json", exclude_unset=True)
    example = [*stage.example] if isinstance(stage.example, tuple) else stage.example
    *sections, key = stage.asked_by.split(".")
    reduce(lambda inner, name: inner.setdefault(name, {}), sections, values)[key] = example
    try:
        check_curriculum(parse_config(values))
    except ConfigError as error:
        return f"it cannot be set either: {error}"
    return f"to have it: grpo run {run / run_files.CONFIG} --set {stage.asked_by}={example}"


def _outdated(stage: Stage, config: RunConfig, now: Mapping[str, Condition]) -> list[Stage]:
    """The stages to run before this one."""
    direct = [read for read in stage.inputs(config) if not now[read.name].is_up_to_date]
    return [*direct, *(further for read in direct for further in _outdated(read, config, now))]


def _why_stale(
    stage: Stage,
    receipt: Receipt,
    config: RunConfig,
    inputs: Mapping[str, Mapping[str, Any]],
    receipts: Mapping[str, dict[str, Any]],
) -> str:
    """Describe what has changed since `receipt`; "" if nothing that concerns the stage has. `inputs`: each stage's
    present lineage inputs.

    An input that is up to date has to be the one that the stage was made from. Any other will be made again first.
    """
    if receipt.get("lineage_key") != hash_values(inputs[stage.name]):
        names = what_changed(receipt.get("inputs", {}), inputs[stage.name])
        others = f" and {len(names) - CHANGES_NAMED} more" if len(names) > CHANGES_NAMED else ""
        return f"changed: {', '.join(names[:CHANGES_NAMED])}{others}" if "inputs" in receipt else "inputs changed"
    for name, then in receipt.get("made_from", {}).items():
        now = receipts[name]
        if now.get("lineage_key") == hash_values(inputs[name]) and identity(now, stage.prompts(config)) != then:
            return f"{name} was made again"
    return ""


def _why_soon_stale(stage: Stage, config: RunConfig, found: Mapping[str, Condition]) -> str:
    """Name an input that will be made again and always counts as new; "" if there is none. Any other input may turn out
    the same."""
    outdated = (read.name for read in stage.inputs(config) if not found[read.name].is_up_to_date and not read.content)
    return next((f"{name} is {found[name].state}" for name in outdated), "")
