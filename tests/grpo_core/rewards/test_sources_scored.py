"""A reward is called with the completions of its sources only, and gives None for the others."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_core.config.inputs import RewardConfig
from grpo_core.rewards.batch import Batch
from grpo_core.rewards.composition import weighted_sum
from grpo_core.rewards.contract import Reward, resolve
from grpo_core.rewards.scoring import score_arriving

SOURCES = ("maths", "code", "other")


def length(completions: list[str], source: list[str], completion_ids: list[list[int]]) -> list[float]:
    assert len(completions) == len(source) == len(completion_ids) > 0
    return [float(len(text) + ids[0]) for text, ids in zip(completions, completion_ids, strict=True)]


async def slow(completions: list[str], source: list[str]) -> list[float]:
    assert set(source) <= {"code"}
    return [-float(len(text)) for text in completions]


def _reward(function: str, *sources: str) -> Reward:
    return replace(resolve(RewardConfig(function=f"{__name__}:{function}")), sources=frozenset(sources))


@pytest.mark.slow
@given(st.lists(st.lists(st.tuples(st.sampled_from(SOURCES), st.text(max_size=3)), max_size=4), min_size=1, max_size=4))
def test_rewards_score_the_completions_of_their_sources_however_they_arrive(
    arriving: list[list[tuple[str, str]]],
) -> None:
    rewards = [_reward("length", "maths", "other"), _reward("slow", "code")]

    def items() -> Iterator[list[tuple[str, str]]]:
        yield from arriving

    def batch_of(found: list[tuple[str, str]]) -> Batch:
        rows = [{"prompt": "p", "source": source} for source, _ in found]
        return Batch(rows, [text for _, text in found], [[len(text)] for _, text in found])

    given, _, columns, _ = score_arriving(rewards, items(), batch_of)  # type: ignore[arg-type]
    assert given == [*itertools.chain(*arriving)]
    expected = [
        [math.nan if source == "code" else 2.0 * len(text) for source, text in given],
        [-float(len(text)) if source == "code" else math.nan for source, text in given],
    ]
    assert repr(columns) == repr(expected)


def test_a_reward_of_other_sources_adds_nothing_to_the_sum() -> None:
    import numpy as np

    rewards = [RewardConfig(function="length", name="a"), RewardConfig(function="length", name="b", weight=2)]
    assert weighted_sum(np.array([[1.0, np.nan], [np.nan, 3.0]]), rewards).tolist() == [1.0, 6.0]
