"""Intervals and tests against published values and exact enumeration, and what the tests promise, simulated."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest

from grpo_core.statistics import POWER, Estimate, estimate, paired_difference, pass_at_k

TRIALS = 400
LEVEL = 0.05


@pytest.mark.parametrize(  # Newcombe 1998, Statistics in Medicine 17, 857-872, table I, method 3
    ("right", "of", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_the_interval_of_a_rate_is_wilson_s(right: int, of: int, low: float, high: float) -> None:
    found = estimate([1.0] * right + [0.0] * (of - right) + [math.nan] * 3, 0.95, 1000, 0, binary=True)
    assert (found.mean, found.num_prompts) == (pytest.approx(right / of), of)
    assert (found.low, found.high) == (pytest.approx(low, abs=5e-5), pytest.approx(high, abs=5e-5))


@pytest.mark.parametrize("values", [(0.0, 0.3, 0.9, 2.0), (-1.0, *(0.5,) * 40, *(0.25,) * 9)], ids=["few", "many"])
def test_the_interval_of_graded_outcomes_is_the_bootstrap_s(values: tuple[float, ...]) -> None:
    distinct = sorted(set(values))
    shares = [Fraction(values.count(value), len(values)) for value in distinct]
    means: dict[float, float] = {}  # the exact distribution of a resample's mean
    for counts in itertools.product(range(len(values) + 1), repeat=len(distinct)):
        if sum(counts) == len(values):
            ways = math.factorial(len(values)) // math.prod(map(math.factorial, counts))
            mean = sum(n * value for n, value in zip(counts, distinct, strict=True)) / len(values)
            chance = ways * math.prod(share**n for share, n in zip(shares, counts, strict=True))
            means[round(mean, 9)] = means.get(round(mean, 9), 0.0) + float(chance)
    support = sorted(means)
    reached = np.cumsum([means[mean] for mean in support])
    found = estimate(values, 0.8, 100_000, 0, binary=False)
    for bound, level in ((found.low, 0.1), (found.high, 0.9)):
        at = float(reached[np.searchsorted(support, bound - 1e-9)])
        before = at - means[support[int(np.searchsorted(support, bound - 1e-9))]]
        assert before - 0.01 <= level <= at + 0.01


def test_without_a_scored_prompt_nothing_is_claimed() -> None:
    found = estimate([math.nan] * 3, 0.95, 1000, 0, binary=True)
    assert math.isnan(found.mean)
    assert isinstance(found, Estimate)
    assert found.num_prompts == 0
    difference = paired_difference([math.nan, 1.0], [1.0, math.nan], 0.95, 1000, 0)
    assert (difference.num_prompts, difference.p_value, difference.probability_better) == (0, 1.0, 0.5)


@pytest.mark.parametrize(("wins", "losses"), [(9, 1), (8, 0), (5, 5), (1, 9), (30, 17), (0, 0)])
def test_of_right_and_wrong_the_test_is_mcnemar_s_exact_one(wins: int, losses: int) -> None:
    before = [0.0] * wins + [1.0] * losses + [1.0] * 20 + [0.0] * 20
    after = [1.0] * wins + [0.0] * losses + [1.0] * 20 + [0.0] * 20
    told_apart = wins + losses
    exact = Fraction(sum(math.comb(told_apart, k) for k in range(wins, told_apart + 1)), 2**told_apart)
    found = paired_difference(before, after, 0.95, 1000, 0)
    assert found.p_value == pytest.approx(float(exact))
    assert found.mean == pytest.approx((wins - losses) / len(before))


@pytest.mark.parametrize(
    "differences",
    [(0.5, 0.25, -0.125, 0.75, 0.3, -0.2, 0.1, 0.6), (0.25, 0.25, -0.25, 0.5, 0.0, 0.25), (-0.3, -0.1, 0.2)],
)
def test_of_graded_outcomes_the_test_is_the_permutation_of_signs(differences: tuple[float, ...]) -> None:
    sums = [
        sum(sign * abs(d) for sign, d in zip(signs, differences, strict=True))
        for signs in itertools.product((-1, 1), repeat=len(differences))
    ]
    exact = float(np.mean([total >= sum(differences) - 1e-9 for total in sums]))
    draws = 100_000
    found = paired_difference([0.0] * len(differences), differences, 0.95, draws, 0).p_value
    assert found == pytest.approx(exact, abs=5 * math.sqrt(exact * (1 - exact) / draws) + 1 / draws)


def test_the_probability_of_being_better_is_the_share_of_resamples_that_are() -> None:
    differences = (0.5, -0.25, 0.25, -0.25)
    sums = [sum(drawn) for drawn in itertools.product(differences, repeat=4)]
    exact = np.mean([1.0 if total > 0 else 0.5 if total == 0 else 0.0 for total in sums])
    found = paired_difference([0.0] * 4, differences, 0.95, 100_000, 0)
    assert found.probability_better == pytest.approx(exact, abs=0.01)


def test_what_is_hard_for_both_cancels_and_a_prompt_that_one_left_unscored_is_left_out() -> None:
    rng = np.random.default_rng(0)
    hardness = rng.random(50) * 100
    gains = rng.random(50)
    plain = paired_difference(np.zeros(50), gains, 0.95, 1000, 0)
    harder = paired_difference(hardness, hardness + gains, 0.95, 1000, 0)
    assert (harder.mean, harder.low, harder.high) == pytest.approx((plain.mean, plain.low, plain.high))
    gap = np.append(gains, math.nan)
    assert paired_difference(np.zeros(51), gap, 0.95, 1000, 0) == plain


@pytest.mark.parametrize("n", [1, 2, 5, 7])
def test_pass_at_k_is_the_share_of_all_subsets_with_a_right_sample(n: int) -> None:
    for right, k in itertools.product(range(n + 1), range(1, n + 1)):
        subsets = list(itertools.combinations([True] * right + [False] * (n - right), k))
        assert pass_at_k(right, n, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


Policy = Callable[[np.random.Generator, np.ndarray, float], np.ndarray]


def _binary(rng: np.random.Generator, hardness: np.ndarray, gain: float) -> np.ndarray:
    return (rng.random(len(hardness)) < hardness + gain).astype(float)


def _graded(rng: np.random.Generator, hardness: np.ndarray, gain: float) -> np.ndarray:
    return rng.binomial(4, hardness + gain) / 4


def _trials(policy: Policy, gain: float) -> tuple[float, float]:
    """Share of comparisons in which a policy that is better by `gain` is found so, and the mean minimum detectable
    difference that they state."""
    rng = np.random.default_rng(7)
    found, detectable = [], []
    for trial in range(TRIALS):
        hardness = rng.uniform(0.1, 0.7, 200)  # of this trial's prompts: the probability of a right answer
        before, after = policy(rng, hardness, 0.0), policy(rng, hardness, gain)
        difference = paired_difference(before, after, 1 - LEVEL, 500, trial)
        found.append(difference.p_value <= LEVEL)
        detectable.append(difference.minimum_detectable)
    return float(np.mean(found)), float(np.mean(detectable))


@pytest.mark.parametrize("policy", [_binary, _graded])
def test_a_policy_that_is_no_better_is_found_better_no_more_often_than_stated_and_a_planted_gain_is_found(
    policy: Policy,
) -> None:
    false, detectable = _trials(policy, 0.0)
    assert false <= LEVEL + 2 * math.sqrt(LEVEL * (1 - LEVEL) / TRIALS)
    true, _ = _trials(policy, detectable)
    assert true >= POWER - 2 * math.sqrt(POWER * (1 - POWER) / TRIALS)
    half, _ = _trials(policy, detectable / 2)
    assert half < POWER, "the stated difference is about the least that is found"
