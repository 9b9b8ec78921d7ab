"""The arms of a sweep: runs that differ in a few keys and name the same sweep (registry.sweep). An arm copies a stage's
output from another arm if its own would be the same."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_core.config.run import RunConfig
from tasks.stages.run_directory import find_runs, read_config, storage_root
from tasks.stages.table import Stage

# Fields of a receipt that are not copied.
OF_ONE_RUN = {"lineage_key", "made_from", "inputs", "made", "made_at", "seconds"}


def sweep_folder(sweep: str) -> Path:
    """Folder for what belongs to no single arm of a sweep: its comparison, its MLflow run."""
    return storage_root() / "sweeps" / sweep


def arm_prefix(sweep: str) -> str:
    """Prefix of the names of a sweep's arms."""
    return f"{sweep}."


def arms_of(sweep: str) -> dict[str, RunConfig]:
    """Configurations of a sweep's arms, by name. Raises ConfigError if one is not valid."""
    named = {name: run for name, run in sorted(find_runs().items()) if name.startswith(arm_prefix(sweep))}
    configs = {name: read_config(run) for name, run in named.items()}
    return {name: config for name, config in configs.items() if config.registry.sweep == sweep}


def other_arms(run: Path, config: RunConfig) -> list[Path]:
    """Directories of the other arms of a run's sweep; empty if the run is not an arm."""
    if not (sweep := config.registry.sweep):
        return []
    runs = sorted(find_runs().items())
    return [folder for name, folder in runs if name.startswith(arm_prefix(sweep)) and name != run.name]


def arm_with_output(stage: Stage, run: Path, config: RunConfig, origin: Mapping[str, Any]) -> Path | None:
    """Find another arm whose output of the stage is the one that this run would make. `origin`: lineage key of that
    output and the inputs it is made from. Searches only for interchangeable outputs."""
    if stage.content is None:
        return None
    for other in other_arms(run, config):
        receipt = stage.read_receipt(other)
        if {key: receipt.get(key) for key in origin} == origin and all(
            (stage.path(other) / name).exists() for name in stage.files(config, receipt)
        ):
            return other
    return None


def copy_output(stage: Stage, other: Path, partial: Path) -> dict[str, Any]:
    """Copy the stage's output of another arm to `partial`; returns the facts of its receipt, and that arm's name."""
    if stage.receipt:
        shutil.copytree(stage.path(other), partial, dirs_exist_ok=True)
    facts = {key: value for key, value in stage.read_receipt(other).items() if key not in OF_ONE_RUN}
    return {**facts, "taken_from": other.name}
