"""Properties of a run's validated data that its plan needs."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_core.planning.pace import EnvironmentPace, ValidatedCosts
from tasks.data.path_or_hub import data_set
from tasks.stages.files import read_json
from tasks.stages.table import VALIDATE


@dataclass(frozen=True)
class Validated:
    """Sizes of the validated data, and what they cost in time."""

    num_prompts: list[int]  # training prompts per source
    mean_tokens: float  # per prompt
    longest: int
    costs: ValidatedCosts
    prompts: Path  # training prompts


def validated(folder: Path, receipt: Mapping[str, Any]) -> Validated:
    """Read the output of the stage validate in `folder`."""
    lengths, parts = receipt["lengths"]["train"], receipt["parts"]
    counts = [part["num_prompts"] for name, part in parts.items() if data_set(name) == "train"]
    rewards = receipt.get("rehearsal", {}).get("rewards", {})
    seconds = sum(reward["seconds_per_completion"] for reward in rewards.values())
    environment = _environment_pace(receipt.get("rehearsal", {}).get("environments", {}))
    path = (folder / "train.parquet").resolve()
    costs = ValidatedCosts(receipt["num_prompts"]["eval"], seconds, environment)
    return Validated(counts, lengths["mean"], lengths["max"], costs, path)


def _environment_pace(rehearsed: Mapping[str, Any]) -> EnvironmentPace | None:
    """Mean pace of the environments; None if there are none."""
    if not rehearsed:
        return None
    found = []
    for each in rehearsed.values():
        frame, tools = (each["reset"], each["get_reward"]), each["tools"].values()
        found.append(
            (
                sum(part["seconds"] for part in frame),
                sum(part["tokens"] for part in frame),
                max((tool["seconds"] for tool in tools), default=0.0),
                max((tool["tokens"] for tool in tools), default=0),
            )
        )
    return EnvironmentPace(*(statistics.mean(values) for values in zip(*found, strict=True)))


def read_validated(run: Path) -> Validated | None:
    """Read the validated data of a run directory; None if there is none, or if an older version wrote it."""
    try:
        return validated(VALIDATE.path(run), read_json(VALIDATE.path(run) / VALIDATE.receipt))
    except KeyError:
        return None
