"""Rewards → advantages against golden values and the properties that make them relative to the group."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_core.advantages import group_advantages

NAN = math.nan
GOLDEN = [[1, 0], [0, 1], [1, 1], [0, NAN], [0, 0], [0, 0], [NAN, NAN], [0, 1]]
WEIGHTS = torch.tensor([1.0, 0.5])


def test_group_scaled_advantages_are_the_golden_ones() -> None:
    result = group_advantages(torch.tensor(GOLDEN), WEIGHTS, 4)
    expected = [0.38724, -0.38724, 1.16171, -1.16171, -0.57715, -0.57715, 0, 1.1543]
    assert result.advantages.tolist() == pytest.approx(expected, abs=1e-5)


def test_batch_scaling_divides_by_the_deviation_of_all_scored_rewards() -> None:
    result = group_advantages(torch.tensor(GOLDEN), WEIGHTS, 4, "batch")
    rewards = [1, 0.5, 1.5, 0, 0, 0, 0.5]
    mean = sum(rewards) / 7
    sigma = math.sqrt(sum((r - mean) ** 2 for r in rewards) / 6)
    expected = [0.25, -0.25, 0.75, -0.75, -1 / 6, -1 / 6, 0, 1 / 3]
    assert result.advantages.tolist() == pytest.approx([a / (sigma + 1e-4) for a in expected], abs=1e-6)


def test_without_scaling_advantages_are_differences_from_the_group_mean() -> None:
    result = group_advantages(torch.tensor(GOLDEN), WEIGHTS, 4, "none")
    expected = [0.25, -0.25, 0.75, -0.75, -1 / 6, -1 / 6, 0, 1 / 3]
    assert result.advantages.tolist() == pytest.approx(expected, abs=1e-6)


def test_a_group_with_one_scored_completion_has_nothing_to_compare() -> None:
    matrix = torch.tensor([[3.0], [NAN], [NAN], [NAN]])
    for scaling in ("group", "batch", "none"):
        result = group_advantages(matrix, torch.ones(1), 4, scaling)
        assert result.advantages.tolist() == [0, 0, 0, 0]


@given(st.integers(1, 5), st.floats(-100, 100, allow_nan=False))
def test_equal_rewards_carry_no_signal_however_they_round(groups: int, value: float) -> None:
    matrix = torch.tensor([[value, value / 3, 0.1]] * (groups * 3), dtype=torch.float64)
    result = group_advantages(matrix, torch.tensor([0.1, 0.7, 0.3]), 3)
    assert result.group_std.tolist() == [0.0] * groups
    assert result.advantages.tolist() == [0.0] * (groups * 3)


@pytest.mark.parametrize("scaling", ["group", "batch", "none"])
def test_sums_that_differ_by_rounding_only_are_equal(scaling: Any) -> None:
    rows = [[0.1, 0.1, 0.1], [0.3, 0, 0], [0, 0.2, 0.1], [1, 0, 0], [0, 0, 0], [0, 0, 0]]
    result = group_advantages(torch.tensor(rows, dtype=torch.float64), torch.ones(3), 3, scaling)
    assert result.group_std[0] == 0
    assert result.advantages[:3].tolist() == [0, 0, 0]
    assert result.advantages[3] > 0 > result.advantages[4]


@pytest.mark.parametrize("scaling", ["group", "none"])
@given(
    rewards=st.lists(st.floats(-10, 10, allow_nan=False), min_size=8, max_size=8),
    constants=st.tuples(st.floats(-5, 5, allow_nan=False), st.floats(-5, 5, allow_nan=False)),
)
def test_a_constant_added_to_a_group_changes_nothing(
    scaling: Any, rewards: list[float], constants: tuple[float, float]
) -> None:
    plain = torch.tensor(rewards, dtype=torch.float64)[:, None]
    shift = torch.tensor(constants, dtype=torch.float64).repeat_interleave(4)[:, None]
    first = group_advantages(plain, torch.ones(1), 4, scaling).advantages
    second = group_advantages(plain + shift, torch.ones(1), 4, scaling).advantages
    assert first.tolist() == pytest.approx(second.tolist(), abs=1e-5)
