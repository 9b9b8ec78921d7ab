"""What a run's validated data say to its plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.stages.files import read_json
from tasks.stages.table import VALIDATE


@dataclass(frozen=True)
class Validated:
    """Sizes of the validated data, and the pace of the rewards on a few of their rows."""

    num_prompts: int  # to train on
    held_out_prompts: int
    mean_tokens: float  # per prompt
    longest: int
    reward_seconds: float  # of all rewards, per completion
    prompts: Path  # those to train on


def validated(folder: Path, receipt: Mapping[str, Any]) -> Validated:
    """What the stage validate wrote into `folder`."""
    counts, lengths = receipt["num_prompts"], receipt["lengths"]["train"]
    rewards = receipt.get("rehearsal", {}).get("rewards", {})
    seconds = sum(reward["seconds_per_completion"] for reward in rewards.values())
    path = (folder / "train.parquet").resolve()
    return Validated(counts["train"], counts["eval"], lengths["mean"], lengths["max"], seconds, path)


def read_validated(run: Path) -> Validated | None:
    """The validated data of a run directory; None if there are none, or if an older version wrote them."""
    try:
        return validated(VALIDATE.path(run), read_json(VALIDATE.path(run) / VALIDATE.receipt))
    except KeyError:
        return None
