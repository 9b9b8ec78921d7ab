"""Stops the training of a sweep's arm that has fallen behind the arms before it (`grpo sweep --stop-early`)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from grpo_core import run_files
from grpo_core.config.run import RunConfig
from grpo_core.data.units import number_units, per_unit
from grpo_core.evaluation.outcomes import bounds_of
from grpo_core.evaluation.sequential import has_fallen_behind
from grpo_core.system.tables import read_parquet
from tasks.stages.arms import arms_of, sweep_folder
from tasks.stages.condition import MARKER
from tasks.stages.errors import ArmStopped
from tasks.stages.files import read_json, write_text
from tasks.stages.lineage import lineage_keys
from tasks.stages.run_directory import run_folder
from tasks.stages.table import TRAIN, VALIDATE

RULE = "stop_early.json"  # in the sweep's folder: `trainings`, as in `write_rule`; `level`; whether it `stops` arms
STOPPED = "stopped.json"  # in an unfinished training: why it was stopped


def trainings_of(arms: Sequence[RunConfig]) -> dict[str, str]:
    """Lineage key of each arm's training, by the arm's name, in the order in which they run."""
    return {config.name: lineage_keys(config)[TRAIN.name] for config in arms}


def shared_level(confidence: float) -> float:
    """Level at which a sweep that stops arms stops them, and that at which it then chooses: half of 1 − confidence
    each, so that with `confidence` it errs in neither."""
    return (1 - confidence) / 2


def write_rule(sweep: str, trainings: Mapping[str, str], level: float | None) -> None:
    """Write the rule by which arms are stopped; with `level` None, no arms are stopped. `trainings`: see
    `trainings_of`. A rule that has stopped arms is kept, since its level is spent."""
    file, rule = sweep_folder(sweep) / RULE, read_rule(sweep)
    if level is not None:
        rule = {"trainings": {**trainings}, "level": level}
    if rule:
        write_text(file, json.dumps({**rule, "stops": level is not None}) + "\n")


def read_rule(sweep: str) -> dict[str, Any]:
    """Read the rule by which the sweep stops arms, or has stopped some; empty if there never was one."""
    return read_json(sweep_folder(sweep) / RULE)


def why_stopped(run: Path, config: RunConfig) -> str:
    """Return why the arm's training was stopped; "" if it was not, or if a different training would start now."""
    folder = TRAIN.partial(run)
    same = read_json(folder / MARKER).get("lineage_key") == lineage_keys(config)[TRAIN.name]
    return read_json(folder / STOPPED).get("reason", "") if same else ""


def stopped_arms(sweep: str) -> dict[str, str]:
    """Arms of a sweep whose trainings were stopped, with the reasons."""
    reasons = {name: read_json(TRAIN.partial(run_folder(name)) / STOPPED).get("reason", "") for name in arms_of(sweep)}
    return {name: reason for name, reason in reasons.items() if reason}


class Race:
    """Compares an arm's training with those of the arms before it, each as the rule names it: another training of an
    arm is no part of the sweep. Does nothing for a run that is not an arm, or if no rule stops arms. `folder`: where
    the training writes; `updates`: its number of updates."""

    def __init__(self, run: Path, config: RunConfig, folder: Path, updates: int):
        self.folder, self.updates, self.seen = folder, updates, 0
        rule = read_rule(config.registry.sweep) if config.registry.sweep else {}
        trainings: dict[str, str] = rule["trainings"] if rule.get("stops") else {}
        arms, own = [*trainings], read_json(folder / MARKER).get("lineage_key")
        is_arm = run.name in arms and own == trainings[run.name]
        self.earlier = arms[: arms.index(run.name)] if is_arm else []
        (folder / STOPPED).unlink(missing_ok=True)
        if not self.earlier:
            return
        self.stoppable, self.level = len(arms) - 1, rule["level"]
        lowest, highest = bounds_of("reward", config)
        self.most = highest - lowest
        self.numbers = number_units(read_parquet(run_files.prompts(run, "eval")).iter_rows(named=True), config)
        found = {run.parent / name: _training(run.parent / name, trainings[name]) for name in self.earlier}
        self.rivals = [there for other, there in found.items() if there and _asked(other) == _asked(run)]

    def look(self) -> None:
        """Raises ArmStopped if the training has fallen behind. Cheap if there was no evaluation since the last call."""
        if not self.earlier:
            return
        steps = sorted(path.name for path in (self.folder / run_files.HELD_OUT_SCORES).glob("step-*.parquet"))
        if len(steps) == self.seen:
            return
        self.seen, update = len(steps), int(steps[-1].removeprefix("step-").removesuffix(".parquet"))
        if update == self.updates:  # a training that is done is not stopped, but evaluated
            return
        looks = [self._differences(step) for step in steps]
        of_looks = [[*look.values()] for look in looks]
        if has_fallen_behind(of_looks, len(self.earlier), self.stoppable, self.most, self.level):
            gaps = {name: -float(np.nanmean(differences)) for name, differences in looks[-1].items()}
            best = max(gaps, key=gaps.__getitem__, default="")
            behind = f", {gaps[best]:.3f} in reward behind {best}" if best else ""
            reason = f"stopped after update {update} of {self.updates}{behind}"
            write_text(self.folder / STOPPED, json.dumps({"reason": reason}) + "\n")
            raise ArmStopped(reason)

    def _differences(self, step: str) -> dict[str, np.ndarray]:
        """This arm's reward minus that of each earlier arm on each held-out prompt or group after an update, by the
        earlier arm's name. Includes only arms that were evaluated after this update."""
        own = _rewards(self.folder, step)
        there = [training for training in self.rivals if (training / run_files.HELD_OUT_SCORES / step).exists()]
        return {it.parent.name: per_unit(own - _rewards(it, step), self.numbers) for it in there}


def _rewards(training: Path, step: str) -> np.ndarray:
    """Reward on each row of the held-out prompts after an update; NaN if it was not scored. (N,)"""
    scores = read_parquet(training / run_files.HELD_OUT_SCORES / step)["reward"]
    return scores.fill_null(np.nan).to_numpy()


def _training(run: Path, key: str) -> Path | None:
    """Folder of the arm's training with this lineage key, finished or not; None if there is none."""
    keys = {
        TRAIN.path(run): TRAIN.read_receipt(run).get("lineage_key"),
        TRAIN.partial(run): read_json(TRAIN.partial(run) / MARKER).get("lineage_key"),
    }
    return next((folder for folder, its in keys.items() if its == key), None)


def _asked(run: Path) -> str | None:
    """Identity of the run's held-out prompts."""
    return (VALIDATE.read_receipt(run).get("made") or {}).get("eval")
