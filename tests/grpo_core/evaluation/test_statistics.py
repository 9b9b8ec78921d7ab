"""Intervals and tests against published values and other ways to compute them, and what they promise, simulated."""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
from scipy import stats

from grpo_core.evaluation.statistics import POWER, Bounds, estimate, paired_difference, pass_at_k, tail

TRIALS = 200
LEVEL = 0.05
SHARE = (0.0, 1.0)
UNKNOWN = (-math.inf, math.inf)


@pytest.mark.parametrize(  # Newcombe 1998, Statistics in Medicine 17, 857-872, table I, method 3
    ("right", "of", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_the_interval_of_a_rate_is_wilson_s(right: int, of: int, low: float, high: float) -> None:
    found = estimate([1.0] * right + [0.0] * (of - right) + [math.nan] * 3, 0.95, SHARE)
    assert (found.mean, found.num_units) == (pytest.approx(right / of), of)
    assert (found.low, found.high) == (pytest.approx(low, abs=5e-5), pytest.approx(high, abs=5e-5))


def test_the_interval_of_each_rate_is_scipy_s() -> None:
    for of in (1, 2, 9, 40):
        for right in range(of + 1):
            exact = stats.binomtest(right, of).proportion_ci(0.9, method="wilson")
            found = estimate([1.0] * right + [0.0] * (of - right), 0.9, SHARE)
            assert (found.low, found.high) == (pytest.approx(exact.low), pytest.approx(exact.high))


def _pairs(wins: int, losses: int, same: int) -> tuple[list[float], list[float]]:
    """Outcomes before and after; where both are the same, both are right."""
    return [0.0] * wins + [1.0] * (losses + same), [1.0] * wins + [0.0] * losses + [1.0] * same


@pytest.mark.parametrize(  # Fagerland, Lydersen & Laake 2017, Statistical Analysis of Contingency Tables, chapter 8
    ("wins", "losses", "of", "low", "high"), [(6, 16, 161, -0.1240, -0.0054), (1, 7, 21, -0.517, -0.026)]
)
def test_the_interval_of_a_paired_difference_of_rates_is_tango_s(
    wins: int, losses: int, of: int, low: float, high: float
) -> None:
    same = of - wins - losses
    found = paired_difference(
        [0.0] * wins + [1.0] * (losses + same), [1.0] * wins + [0.0] * losses + [1.0] * same, 0.95, SHARE
    )
    digits = 5 * 10.0 ** -(1 + len(str(low).rsplit(".")[-1]))
    assert (found.low, found.high) == (pytest.approx(low, abs=digits), pytest.approx(high, abs=digits))


@pytest.mark.parametrize(("wins", "losses", "of"), [(0, 0, 10), (5, 0, 100), (10, 0, 10), (0, 10, 10), (0, 0, 1)])
def test_the_interval_of_a_paired_difference_is_symmetric_and_never_a_point(wins: int, losses: int, of: int) -> None:
    before, after = _pairs(wins, losses, of - wins - losses)
    forth, back = (paired_difference(*pair, 0.95, SHARE) for pair in ((before, after), (after, before)))
    assert -1 <= forth.low < forth.high <= 1
    assert (forth.low, forth.high) == (pytest.approx(-back.high), pytest.approx(-back.low))
    assert forth.low <= forth.mean <= forth.high
    z = 1.959964
    if not wins + losses:  # the score test's statistic without a discordant pair, solved by hand
        assert forth.high == pytest.approx(z**2 / (of + z**2), rel=1e-5)


@pytest.mark.parametrize(("ones", "of"), [(0, 10), (3, 10), (10, 10), (1, 1), (199, 200), (20, 1000)])
def test_the_interval_of_graded_outcomes_of_two_values_is_clopper_and_pearson_s(ones: int, of: int) -> None:
    exact = stats.binomtest(ones, of).proportion_ci(0.95, method="exact")
    found = estimate([2.0] * ones + [0.0] * (of - ones), 0.95, (0.0, 2.0))
    assert (found.low, found.high) == (pytest.approx(2 * exact.low, abs=1e-5), pytest.approx(2 * exact.high, abs=1e-5))


@pytest.mark.parametrize("bounds", [SHARE, UNKNOWN])
def test_the_test_of_graded_outcomes_is_the_bayesian_bootstrap_with_one_worst_prompt(bounds: Bounds) -> None:
    rng = np.random.default_rng(5)
    before, after = rng.binomial(4, 0.4, 30) / 4, np.clip(rng.beta(2, 2, 30), 0.1, 0.9)
    worst = 1.0 if bounds == SHARE else max(before.max(), after.max()) - min(before.min(), after.min())
    weights = rng.dirichlet(np.ones(31), 200_000)
    means = weights @ np.append(after - before, -worst)
    found = paired_difference(before, after, 0.95, bounds)
    exact = float((means <= 0).mean())
    assert found.p_value == pytest.approx(exact, abs=5 * math.sqrt(exact / 200_000))
    assert (means <= found.low).mean() == pytest.approx(0.025, abs=5 * math.sqrt(0.025 / 200_000))


def test_a_p_value_far_out_keeps_its_precision() -> None:
    """200 wins of 200 by a half: all weight beyond the worst prompt's, Beta(1, 200), has to be less than 1/3."""
    found = paired_difference([0.0] * 200, [0.5] * 200, 0.95, SHARE)
    assert found.p_value == pytest.approx(float(stats.beta.sf(1 / 3, 1, 200)), rel=1e-3)


@pytest.mark.parametrize("n", [1_000, 5_000, 20_000, 100_000])
@pytest.mark.parametrize("outliers", [1, 2, 3])
@pytest.mark.parametrize("probability", [0.999, 0.5, 0.01, 1e-12])
def test_few_outliers_among_equal_values_have_their_exact_probability(
    n: int, outliers: int, probability: float
) -> None:
    """The outliers' share of all weight is Beta(outliers, n)."""
    share = float(stats.beta.isf(probability, outliers, n))
    values = np.append(np.full(n, share / (1 - share)), np.full(outliers, -1.0))
    assert tail(values) == pytest.approx(probability, rel=2e-3)
    assert tail(-values) == pytest.approx(float(stats.beta.cdf(share, outliers, n)), abs=2e-3)


@pytest.mark.parametrize("n", [500, 2_000, 100_000])
def test_a_policy_that_loses_every_prompt_is_better_with_probability_zero(n: int) -> None:
    found = paired_difference(np.ones(n), np.zeros(n), 0.95, SHARE)
    assert found.probability_better == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("scale", [1e-200, 1e-160, 1e150])
def test_the_unit_of_outcomes_changes_nothing(scale: float) -> None:
    rng = np.random.default_rng(9)
    before, after = rng.random(40), rng.random(40)
    plain, scaled = (paired_difference(unit * before, unit * after, 0.95, (0.0, 2.0 * unit)) for unit in (1.0, scale))
    assert (scaled.p_value, scaled.probability_better) == pytest.approx((plain.p_value, plain.probability_better))
    for name in ("mean", "low", "high", "minimum_detectable"):
        assert getattr(scaled, name) / scale == pytest.approx(getattr(plain, name), rel=1e-6)
    one, other = (estimate(unit * before, 0.95, (0.0, 2.0 * unit)) for unit in (1.0, scale))
    assert (other.mean / scale, other.low / scale, other.high / scale) == pytest.approx(
        (one.mean, one.low, one.high), rel=1e-6
    )


@pytest.mark.filterwarnings("error")
def test_an_absurdly_wide_range_shows_nothing_instead_of_an_overflow() -> None:
    before, after = np.zeros(50), np.random.default_rng(1).normal(0.02, 1, 50)
    for end in (1e155, 1e307):
        found = paired_difference(before, after, 0.95, (-end, end))
        assert found.p_value == 1.0
        assert found.probability_better == pytest.approx(0.5, abs=1e-3)
        assert found.low < -end / 100 and found.high > end / 100


def test_without_a_scored_prompt_nothing_is_claimed() -> None:
    found = estimate([math.nan] * 3, 0.95, SHARE)
    assert math.isnan(found.mean)
    assert found.num_units == 0
    difference = paired_difference([math.nan, 1.0], [1.0, math.nan], 0.95, SHARE)
    assert (difference.num_units, difference.p_value, difference.probability_better) == (0, 1.0, 0.5)


def test_equal_outcomes_of_unknown_range_have_no_interval() -> None:
    found = paired_difference([3.0] * 50, [3.0] * 50, 0.95, UNKNOWN)
    assert (found.mean, found.p_value) == (0.0, 1.0)
    assert math.isnan(found.low) and math.isnan(found.high) and math.isnan(estimate([3.0] * 50, 0.95, UNKNOWN).low)


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [([1.0], [0.0, 1.0, 1.0], "no pairs"), ([[1.0]], [[1.0]], "no pairs"), ([0.0, 1.0], [1.0, math.inf], "infinite")],
)
def test_outcomes_that_are_no_pairs_or_infinite_are_refused(
    before: list[float], after: list[float], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        paired_difference(before, after, 0.95, UNKNOWN)


@pytest.mark.parametrize(("wins", "losses"), [(9, 1), (8, 0), (5, 5), (1, 9), (30, 17), (0, 0)])
def test_of_right_and_wrong_the_test_is_mcnemar_s_exact_one(wins: int, losses: int) -> None:
    before = [0.0] * wins + [1.0] * losses + [1.0] * 20 + [0.0] * 20
    after = [1.0] * wins + [0.0] * losses + [1.0] * 20 + [0.0] * 20
    told_apart = wins + losses
    exact = Fraction(sum(math.comb(told_apart, k) for k in range(wins, told_apart + 1)), 2**told_apart)
    found = paired_difference(before, after, 0.95, SHARE)
    assert found.p_value == pytest.approx(float(exact))
    assert found.mean == pytest.approx((wins - losses) / len(before))


@pytest.mark.parametrize(("wins", "losses"), [(9, 1), (0, 0), (30, 17)])
def test_the_probability_of_being_better_is_the_posterior_s(wins: int, losses: int) -> None:
    """With a uniform prior it is P(Beta(wins + 1, losses + 1) > 1/2) of wins and losses."""
    outcomes = ([0.0] * wins + [1.0] * losses + [0.0] * 5, [1.0] * wins + [0.0] * losses + [0.0] * 5)
    found = paired_difference(*outcomes, 0.95, SHARE)
    assert found.probability_better == pytest.approx(float(stats.beta.sf(0.5, wins + 1, losses + 1)), abs=1e-6)


def test_what_is_hard_for_both_cancels_and_a_prompt_that_one_left_unscored_is_left_out() -> None:
    rng = np.random.default_rng(0)
    hardness = rng.random(50)
    gains = rng.random(50)
    plain = paired_difference(np.zeros(50), gains, 0.95, (0.0, 2.0))
    harder = paired_difference(hardness, hardness + gains, 0.95, (0.0, 2.0))
    assert (harder.mean, harder.low, harder.high) == pytest.approx((plain.mean, plain.low, plain.high))
    gap = np.append(gains, math.nan)
    assert paired_difference(np.zeros(51), gap, 0.95, (0.0, 2.0)) == plain


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
    for _ in range(TRIALS):
        hardness = rng.uniform(0.1, 0.7, 200)  # of this trial's prompts: the probability of a right answer
        before, after = policy(rng, hardness, 0.0), policy(rng, hardness, gain)
        difference = paired_difference(before, after, 1 - LEVEL, SHARE)
        found.append(difference.p_value <= LEVEL)
        detectable.append(difference.minimum_detectable)
    return float(np.mean(found)), float(np.mean(detectable))


@pytest.mark.slow
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


def _most(rate: float, trials: int) -> int:
    """What a procedure that errs with this rate exceeds in one of a thousand such series."""
    return int(stats.binom.ppf(0.999, trials, rate))


@pytest.mark.parametrize(("loss", "n"), [(0.02, 20), (0.02, 50), (0.05, 50), (0.05, 100)])
def test_a_policy_that_rarely_loses_much_and_is_no_better_is_seldom_found_better(loss: float, n: int) -> None:
    """One prompt in 50 or 20 is lost altogether, the others gain what makes the mean difference 0."""
    rng, trials = np.random.default_rng(3), 200
    before = np.full(n, 0.9)
    gain = 0.9 * loss / (1 - loss)

    @functools.cache
    def is_found(lost: int) -> bool:
        after = np.where(np.arange(n) < lost, 0.0, 0.9 + gain)
        return paired_difference(before, after, 0.95, SHARE).p_value <= LEVEL

    assert sum(is_found(lost) for lost in rng.binomial(n, loss, trials)) <= _most(LEVEL, trials)


@pytest.mark.parametrize(
    ("wins", "losses", "n"), [(0.05, 0.03, 20), (0.05, 0.03, 50), (0.0, 0.05, 10), (0.05, 0.1, 20), (0.1, 0.1, 100)]
)
def test_a_paired_interval_covers_the_true_difference_of_rates(wins: float, losses: float, n: int) -> None:
    rng, trials = np.random.default_rng(4), 1000
    missed = kept = 0
    counts = rng.multinomial(n, [wins, losses, 1 - wins - losses], size=trials)
    for (won, lost, same), times in Counter(map(tuple, counts)).items():
        found = paired_difference(*_pairs(won, lost, same), 0.95, SHARE)
        missed += times * (not found.low <= wins - losses <= found.high)
        kept += times * (found.low >= wins - losses)  # a guard with this max_drop is kept
    assert missed <= _most(0.05, trials)
    assert kept <= _most(0.025, trials)


def test_the_interval_of_an_accuracy_of_several_samples_covers_where_nearly_all_are_right() -> None:
    rng, trials = np.random.default_rng(6), 300
    rates = (0.9, 1.0)  # 0.97 in the mean
    drawn = Counter(tuple(sorted(rng.binomial(4, np.where(rng.random(20) < 0.3, *rates)) / 4)) for _ in range(trials))
    found = {values: estimate(values, 0.95, SHARE) for values in drawn}
    assert sum(drawn[values] for values, it in found.items() if not it.low <= 0.97 <= it.high) <= _most(0.05, trials)
    right = estimate([1.0] * 19 + [0.75], 0.95, SHARE)
    assert right.low < 0.85 < right.high
