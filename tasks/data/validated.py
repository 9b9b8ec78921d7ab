"""What a run's validated data say to its plan."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_core.planning.pace import EnvironmentPace
from tasks.data.places import data_set
from tasks.stages.files import read_json
from tasks.stages.table import VALIDATE


@dataclass(frozen=True)
class Validated:
    """Sizes of the validated data, and the pace of the rewards on a few of their rows."""

    num_prompts: list[int]  # to train on, of each source
    held_out_prompts: int
    mean_tokens: float  # per prompt
    longest: int
    reward_seconds: float  # of all rewards, per completion
    environment: EnvironmentPace | None  # if there is one
    prompts: Path  # those to train on


def validated(folder: Path, receipt: Mapping[str, Any]) -> Validated:
    """What the stage validate wrote into `folder`."""
    lengths, parts = receipt["lengths"]["train"], receipt["parts"]
    counts = [part["num_prompts"] for name, part in parts.items() if data_set(name) == "train"]
    rewards = receipt.get("rehearsal", {}).get("rewards", {})
    seconds = sum(reward["seconds_per_completion"] for reward in rewards.values())
    environment = _environment_pace(receipt.get("rehearsal", {}).get("environments", {}))
    path = (folder / "train.parquet").resolve()
    return Validated(
        counts, receipt["num_prompts"]["eval"], lengths["mean"], lengths["max"], seconds, environment, path
    )


def _environment_pace(rehearsed: Mapping[str, Any]) -> EnvironmentPace | None:
    """Means over the environments."""
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
    """The validated data of a run directory; None if there are none, or if an older version wrote them."""
    try:
        return validated(VALIDATE.path(run), read_json(VALIDATE.path(run) / VALIDATE.receipt))
    except KeyError:
        return None
