"""Rewards → advantages against golden values and the properties that make them relative to the group."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_core.algorithm.advantages import group_advantages

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


def test_gdpo_advantages_are_those_of_trl() -> None:
    result = group_advantages(torch.tensor(GOLDEN), WEIGHTS, 4, aggregation="normalize_then_sum")
    expected = [0.408191, -0.816381, 1.632762, -1.224572, -0.408191, -0.408191, 0, 0.816381]
    assert result.advantages.tolist() == pytest.approx(expected, abs=2e-6)
    assert result.rewards.tolist() == pytest.approx([1, 0.5, 1.5, 0, 0, 0, NAN, 0.5], nan_ok=True)


def test_gdpo_gives_each_reward_its_own_scale() -> None:
    matrix = torch.tensor([[0.0, 0], [0, 100], [1, 0], [1, 100]])
    advantages = group_advantages(matrix, torch.ones(2), 4, aggregation="normalize_then_sum").advantages
    # z is ±0.5 / √(1/3) for both rewards: s = ∓√3, 0, 0, √3, whose deviation is √2
    assert advantages.tolist() == pytest.approx([-math.sqrt(1.5), 0, 0, math.sqrt(1.5)], abs=1e-3)


def _std(values: list[float]) -> float:
    mean = sum(values) / len(values)
    return math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1)) if len(values) > 1 else 0.0


def _plain_gdpo(rows: list[list[float]], weights: list[float], g: int) -> list[float]:
    scores: list[float] = [0.0] * len(rows)
    for start in range(0, len(rows), g):
        for k, weight in enumerate(weights):
            column = [row[k] for row in rows[start : start + g] if not math.isnan(row[k])]
            for i in range(start, start + g):
                if not math.isnan(rows[i][k]):
                    scores[i] += weight * (rows[i][k] - sum(column) / len(column)) / (_std(column) + 1e-4)
    scored = [not all(math.isnan(r) for r in row) for row in rows]
    among = [score for score, known in zip(scores, scored, strict=True) if known]
    if not among:
        return scores
    mean, sigma = sum(among) / len(among), _std(among)
    return [(score - mean) / (sigma + 1e-4) if known else 0.0 for score, known in zip(scores, scored, strict=True)]


def _plain_rloo(rewards: list[float], g: int, scaling: str) -> list[float]:
    advantages = []
    for i, reward in enumerate(rewards):
        start = i // g * g
        group = [r for r in rewards[start : start + g] if not math.isnan(r)]
        others = [r for j, r in enumerate(rewards[start : start + g], start) if j != i and not math.isnan(r)]
        if math.isnan(reward) or not others:
            advantages.append(0.0)
            continue
        known = group if scaling == "group" else [r for r in rewards if not math.isnan(r)]
        divisor = 1.0 if scaling == "none" else _std(known) + 1e-4
        advantages.append((reward - sum(others) / len(others)) / divisor)
    return advantages


# Steps of 0.1 tie often and round differently in different sums.
REWARDS = st.one_of(st.none(), st.integers(-20, 20).map(lambda n: n / 10))


@st.composite
def matrices(draw: st.DrawFn, g: int = 4, k: int = 2) -> torch.Tensor:
    row = st.lists(REWARDS, min_size=k, max_size=k)
    size = g * draw(st.integers(1, 4))
    rows = draw(st.lists(row, min_size=size, max_size=size))
    return torch.tensor([[NAN if value is None else value for value in row] for row in rows], dtype=torch.float64)


@given(matrix=matrices(), weights=st.tuples(st.floats(0, 2), st.floats(-2, 2)))
def test_gdpo_is_the_plain_computation(matrix: torch.Tensor, weights: tuple[float, float]) -> None:
    weight = torch.tensor(weights, dtype=torch.float64)
    advantages = group_advantages(matrix, weight, 4, aggregation="normalize_then_sum").advantages
    assert advantages.tolist() == pytest.approx(_plain_gdpo(matrix.tolist(), list(weights), 4), abs=1e-5)


def test_gdpo_sees_no_signal_where_no_reward_differs_or_they_cancel() -> None:
    differs = [[0.0, 0], [0, 1], [1, 0], [1, 1]]
    same = [[0.1 + 0.2, 5], [0.3, 5], [0.3, 5], [0.3, NAN]]
    cancels = [[0.1, 1.7], [0.5, 1.3], [0.8, 1.0], [0.7, 1.1]]
    lone = [[NAN, NAN], [1.0, 2.0], [NAN, NAN], [NAN, NAN]]
    matrix = torch.tensor(differs + same + cancels + lone, dtype=torch.float64)
    result = group_advantages(matrix, torch.ones(2), 4, aggregation="normalize_then_sum")
    assert result.group_std[0] > 0
    assert result.group_std[1:].tolist() == [0, 0, 0]
    assert result.advantages[4:].tolist() == [0] * 12


def test_a_large_constant_reward_does_not_hide_the_others_in_gdpo() -> None:
    matrix = torch.tensor([[0, 1e9], [1, 1e9], [0, 1e9], [1, 1e9]], dtype=torch.float64)
    result = group_advantages(matrix, torch.ones(2), 4, aggregation="normalize_then_sum")
    assert result.group_std[0] > 0.9


@pytest.mark.parametrize("scaling", ["group", "batch", "none"])
def test_weighted_rewards_that_cancel_but_for_rounding_carry_no_signal(scaling: Any) -> None:
    matrix = torch.tensor([[0.1, 0.2, -0.3], [0, 0, 0], [0.2, 0.1, -0.3], [0, 0, 0], [1, 0, 0]] + [[0, 0, 0]] * 3)
    result = group_advantages(matrix.double().round(decimals=1), torch.ones(3), 4, scaling)
    assert result.group_std[0] == 0
    assert result.advantages[:4].tolist() == [0] * 4
    assert result.advantages[4] > 0


@pytest.mark.parametrize("scaling", ["group", "batch", "none"])
@given(matrix=matrices(k=1))
def test_rloo_compares_with_the_mean_of_the_others(scaling: Any, matrix: torch.Tensor) -> None:
    advantages = group_advantages(matrix, torch.ones(1), 4, scaling, estimator="rloo").advantages
    plain = _plain_rloo(matrix.flatten().tolist(), 4, scaling)
    assert advantages.tolist() == pytest.approx(plain, rel=1e-6, abs=1e-6)


@given(st.lists(st.floats(-10, 10), min_size=8, max_size=8))
def test_rloo_is_the_difference_from_the_mean_stretched_by_g_over_g_minus_1(rewards: list[float]) -> None:
    matrix = torch.tensor(rewards, dtype=torch.float64)[:, None]
    grpo, rloo = (
        group_advantages(matrix, torch.ones(1), 4, "none", estimator=estimator).advantages
        for estimator in ("grpo", "rloo")
    )
    assert rloo.tolist() == pytest.approx((grpo * 4 / 3).tolist(), abs=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"scale_rewards": "group"},
        {"scale_rewards": "batch"},
        {"scale_rewards": "none"},
        {"estimator": "rloo"},
        {"estimator": "rloo", "scale_rewards": "batch"},
        {"aggregation": "normalize_then_sum"},
    ],
    ids=str,
)
@given(matrix=matrices(), data=st.data())
def test_a_groups_advantages_sum_to_zero_and_follow_its_completions(
    options: dict[str, Any], matrix: torch.Tensor, data: st.DataObject
) -> None:
    result = group_advantages(matrix, WEIGHTS, 4, **options)
    groups = result.advantages.view(-1, 4)
    assert groups.sum(1).tolist() == pytest.approx([0] * len(groups), abs=1e-4)
    assert groups[result.group_std == 0].count_nonzero() == 0
    assert groups[result.group_std > 0].any(1).all()
    order = torch.cat([torch.tensor(data.draw(st.permutations(range(4)))) + 4 * p for p in range(len(groups))])
    moved = group_advantages(matrix[order], WEIGHTS, 4, **options)
    assert moved.advantages.tolist() == pytest.approx(result.advantages[order].tolist(), abs=1e-5)
    assert moved.group_std.count_nonzero() == result.group_std.count_nonzero()
