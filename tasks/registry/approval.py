"""A person's approval of a version that has passed the gate, and the samples shown to that person."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
from pydantic import BaseModel, ConfigDict, Field

from grpo_core.config.run import RunConfig
from grpo_core.data.chat import turns
from grpo_core.data.images import in_words
from grpo_core.evaluation.outcomes import deciding_metric, outcomes, samples_of
from tasks.registry.gate import Contestant
from tasks.rendering.visible import shortened, visible

WAITING, REJECTED = "waiting", "rejected"
BY, WORDS = "promotion.by", "promotion.words"
SHOWN = 3  # lost prompts, and won prompts
LONGEST = 500  # characters of a prompt or completion


class Approval(BaseModel):
    """A person's answer about a version that has passed the gate."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    approved: bool = Field(title="Make it the champion")
    by: str = Field(min_length=1, max_length=100, title="Your name", description="Kept, not verified.")
    words: str = Field("", max_length=1000, title="Your reason")


@dataclass(frozen=True)
class Change:
    """A prompt on which candidate and rival have different outcomes, with the first completion of each. `gain`:
    candidate minus rival."""

    prompt: str
    rival: str
    candidate: str
    gain: float


def decision_of(accepted: bool, asks: bool, force: bool, approval: Approval | None) -> str:
    """Decision on a version: promoted, refused, forced, waiting or rejected. `asks`: whether a person is asked."""
    if approval and not approval.approved:
        return REJECTED
    if not accepted:
        return "forced" if force else "refused"
    return WAITING if asks and not force and approval is None else "promoted"


def tags_of(approval: Approval | None) -> dict[str, str | None]:
    """Tags of the version for this answer; None as a value removes that tag of an earlier answer."""
    by, words = (visible(approval.by), visible(approval.words)) if approval else (None, None)
    return {BY: by, WORDS: words or None}


def largest_changes(config: RunConfig, candidate: Contestant, rival: Contestant) -> tuple[Change, ...]:
    """Prompts of `promotion.set` on which the candidate lost most, then those on which it won most."""
    metric = config.promotion.metric or deciding_metric(candidate.samples, config.accuracy_reward)

    def seen(contestant: Contestant) -> tuple[np.ndarray, list[str]]:
        samples = samples_of(contestant.samples, config.promotion.set)
        keys = (config.promotion.set, contestant.policy, metric, config.rewards, config.accuracy_reward)
        first = samples.filter(pl.col("sample") == 0).sort("row")
        return outcomes(samples, *keys), first[f"{contestant.policy}/completion"].to_list()

    (before, said_before), (after, said_after) = seen(rival), seen(candidate)
    first = samples_of(candidate.samples, config.promotion.set).filter(pl.col("sample") == 0).sort("row")
    gains = np.nan_to_num(after - before)
    lost = [row for row in np.argsort(gains, kind="stable") if gains[row] < 0][:SHOWN]
    won = [row for row in np.argsort(-gains, kind="stable") if gains[row] > 0][:SHOWN]
    return tuple(
        Change(_text(first["prompt"][int(row)]), _shown(said_before[row]), _shown(said_after[row]), float(gains[row]))
        for row in (*lost, *won)
    )


def _text(prompt: Any) -> str:
    return _shown("\n".join(f"{role}: {text}" if role else text for role, text in turns(in_words(prompt))))


def _shown(text: str) -> str:
    return shortened(text, LONGEST)
