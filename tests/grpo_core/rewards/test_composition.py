"""What a reward counts, against loops written from the definition; one value in training, evaluation and report."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_core.algorithm.advantages import group_advantages
from grpo_core.config.inputs import RewardConfig
from grpo_core.evaluation.outcomes import outcomes
from grpo_core.rewards.composition import counted, range_of_sum, weighted_sum

VALUES = st.none() | st.sampled_from([0.0, 0.5, 1.0]) | st.floats(-10, 10)
NAMES = ("first", "second", "third")


@st.composite
def compositions(draw: st.DrawFn) -> tuple[list[RewardConfig], list[list[float | None]]]:
    rewards = []
    for name in NAMES:
        low = draw(st.floats(-5, 5))
        clip = draw(st.none() | st.just((low, low + draw(st.floats(0.1, 5)))))
        gate = draw(st.none() | st.sampled_from([other for other in NAMES if other != name]))
        values: dict[str, Any] = {"function": "length", "name": name, "weight": draw(st.floats(-2, 2)), "clip": clip}
        values |= {"normalize": draw(st.booleans()) if clip else False, "gate": gate}
        if gate:
            values["gate_threshold"] = draw(st.sampled_from([0.5, 1.0, -1.0]))
        rewards.append(RewardConfig(**values))
    rows = draw(st.lists(st.tuples(*[VALUES] * len(NAMES)).map(list), min_size=1, max_size=6))
    return rewards, rows


def _count(row: list[float | None], rewards: list[RewardConfig], k: int) -> float | None:
    """What reward k of a row counts, step by step."""
    value, reward = row[k], rewards[k]
    if value is None:
        return None
    if reward.clip is not None:
        low, high = reward.clip
        value = low if value < low else high if value > high else value
        if reward.normalize:
            value = (value - low) / (high - low)
    if reward.gate is not None:
        seen = row[NAMES.index(reward.gate)]
        if seen is None or seen < reward.gate_threshold:
            return 0.0
    return value


def _array(rows: list[list[float | None]]) -> np.ndarray:
    return np.array([[math.nan if value is None else value for value in row] for row in rows])


@pytest.mark.slow
@given(compositions())
def test_no_sum_of_values_in_range_leaves_the_range_of_the_sum(
    drawn: tuple[list[RewardConfig], list[list[float | None]]],
) -> None:
    rewards, rows = drawn  # of `length`, which gives 0 to 1
    given_values = np.clip(_array([*rows, [0.0] * 3, [1.0] * 3]), 0, 1)
    low, high = range_of_sum(rewards)
    sums = weighted_sum(given_values, rewards)
    assert (sums[~np.isnan(sums)] >= low - 1e-9).all() and (sums[~np.isnan(sums)] <= high + 1e-9).all()


def test_the_range_of_a_sum_is_that_of_its_terms() -> None:
    right, short = RewardConfig(function="numeric_match"), RewardConfig(function="length", weight=-0.5)
    clipped = RewardConfig(function="char_length", clip=(-4.0, 2.0), normalize=True, weight=3.0)
    assert range_of_sum([right]) == (0.0, 1.0)
    assert range_of_sum([right, short]) == (-0.5, 1.0)
    assert range_of_sum([right, clipped]) == (0.0, 3.0)  # 1 + 3 · 4/6: it gives at most 0
    assert range_of_sum([right, RewardConfig(function="char_length")]) == (-math.inf, 1.0)


@pytest.mark.slow
@given(compositions())
def test_each_reward_counts_what_the_steps_say_and_a_row_is_the_weighted_sum(
    drawn: tuple[list[RewardConfig], list[list[float | None]]],
) -> None:
    rewards, rows = drawn
    expected = [[_count(row, rewards, k) for k in range(len(NAMES))] for row in rows]
    assert counted(_array(rows), rewards) == pytest.approx(_array(expected), nan_ok=True)
    sums = [
        sum(reward.weight * value for reward, value in zip(rewards, row, strict=True) if value is not None)
        if any(value is not None for value in row)
        else math.nan
        for row in expected
    ]
    assert weighted_sum(_array(rows), rewards) == pytest.approx(sums, nan_ok=True)


@pytest.mark.slow
@given(compositions())
def test_training_and_the_report_give_a_completion_the_same_reward(
    drawn: tuple[list[RewardConfig], list[list[float | None]]],
) -> None:
    rewards, rows = drawn
    weights = torch.tensor([reward.weight for reward in rewards])
    trained = group_advantages(torch.from_numpy(counted(_array(rows), rewards)), weights, len(rows)).rewards
    columns = {f"trained/rewards/{name}": [row[k] for row in rows] for k, name in enumerate(NAMES)}
    schema = dict.fromkeys(columns, pl.Float64)
    samples = pl.DataFrame({"set": "hard", "row": range(len(rows)), **columns}, schema_overrides=schema)
    reported = outcomes(samples, "hard", "trained", "reward", rewards, "first")
    assert reported == pytest.approx(trained.numpy(), nan_ok=True, abs=1e-5)


def test_format_first_the_answer_counts_only_in_the_asked_form() -> None:
    rewards = [
        RewardConfig(function="format_regex", weight=0.2),
        RewardConfig(function="numeric_match", gate="format_regex"),
    ]
    in_form_and_right, right_only, in_form_only = [1.0, 1.0], [0.0, 1.0], [1.0, 0.0]
    sums = weighted_sum(_array([in_form_and_right, right_only, in_form_only]), rewards)
    assert sums.tolist() == pytest.approx([1.2, 0.0, 0.2])


def test_a_gate_looks_at_what_a_reward_gave_whatever_became_of_it() -> None:
    """Two rewards that gate each other count where both are reached; one that is normalised opens by its own values."""
    rewards = [
        RewardConfig(function="length", name="a", gate="b", gate_threshold=5.0),
        RewardConfig(function="length", name="b", gate="a", gate_threshold=2.0, clip=(0.0, 10.0), normalize=True),
    ]
    rows: list[list[float | None]] = [[2.0, 5.0], [2.0, 4.0], [1.0, 5.0]]
    assert counted(_array(rows), rewards).tolist() == [[2.0, 0.5], [0.0, 0.4], [1.0, 0.0]]
