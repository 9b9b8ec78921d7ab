"""The gate as a whole, on simulated evaluations: how often it errs, what it finds, what a guard lets through."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
import pytest
from scipy.stats import binom

from grpo_core.config import RunConfig
from grpo_core.statistics import POWER
from tasks.gate import Contestant, Verdict, decide
from tests.evaluations import fixed_samples, promotion_config, simulated_samples

TRIALS = 300
GUARDS = [
    {"set": "general", "metric": "accuracy", "max_drop": 0.3},
    {"metric": "completions/mean_length", "max_rise": 5},
]


def _decide(config: RunConfig, samples: pl.DataFrame, rival: str = "champion") -> Verdict:
    return decide(config, Contestant("version 2", samples, "trained"), Contestant("version 1", samples, rival))


def _trials(config: RunConfig, gain: dict[str, float], trials: int = TRIALS, **simulated: Any) -> list[Verdict]:
    gains = {"champion": {}, "trained": gain}
    return [_decide(config, simulated_samples(seed, gains, **simulated)) for seed in range(trials)]


@pytest.mark.parametrize(
    ("metric", "confidence", "num_samples", "guards"),
    [("accuracy", 0.95, 1, GUARDS), ("accuracy", 0.9, 4, []), ("reward", 0.8, 1, [])],
)
def test_the_same_policy_twice_is_promoted_no_more_often_than_stated(
    metric: str, confidence: float, num_samples: int, guards: list[dict[str, Any]]
) -> None:
    config = promotion_config(metric=metric, confidence=confidence, guards=guards)
    promoted = sum(verdict.accepted for verdict in _trials(config, {}, num_samples=num_samples))
    # What a gate that errs exactly as often as stated exceeds in one of a hundred such series.
    assert promoted <= binom.ppf(0.99, TRIALS, 1 - confidence)


def test_a_difference_that_is_said_to_be_detectable_is_found_with_the_stated_power() -> None:
    config = promotion_config(guards=GUARDS)
    stated = [verdict.comparisons[0].difference.minimum_detectable for verdict in _trials(config, {}, trials=50)]
    found = sum(verdict.accepted for verdict in _trials(config, {"held-out": float(np.mean(stated))}))
    assert binom.ppf(0.01, TRIALS, POWER) <= found <= binom.ppf(0.99, TRIALS, POWER + 0.1)


def test_a_guard_lets_through_few_that_lose_as_much_as_it_allows() -> None:
    loses = {"held-out": 0.4, "general": -0.1}
    config = promotion_config(guards=[{"set": "general", "metric": "accuracy", "max_drop": 0.1}])
    guarded, unguarded = _trials(config, loses, trials=100), _trials(promotion_config(), loses, trials=10)
    assert sum(verdict.accepted for verdict in guarded) <= binom.ppf(0.99, 100, 1 - config.promotion.confidence)
    assert all(verdict.comparisons[0].broken is None for verdict in guarded)
    assert all(verdict.accepted for verdict in unguarded)


def test_the_line_between_promoted_and_refused_is_the_exact_sign_tests() -> None:
    """Five wins of five happen by chance with probability 1/32, four of four with 1/16."""
    for wins, p_value, accepted in [(5, 1 / 32, True), (4, 1 / 16, False)]:
        samples = fixed_samples({"champion": [0] * 10, "trained": [1] * wins + [0] * (10 - wins)})
        verdict = _decide(promotion_config(), samples)
        assert (verdict.accepted, verdict.comparisons[0].difference.p_value) == (accepted, pytest.approx(p_value))
    assert _decide(promotion_config(confidence=0.9), samples).accepted


def test_a_gain_smaller_than_what_is_worth_a_promotion_is_refused() -> None:
    samples = fixed_samples({"champion": [0] * 10 + [1] * 10, "trained": [1] * 5 + [0] * 5 + [1] * 10})
    assert _decide(promotion_config(min_gain=0.25), samples).accepted
    verdict = _decide(promotion_config(min_gain=0.26), samples)
    assert not verdict.accepted
    assert verdict.reason.startswith(
        "accuracy on held-out 75.0% against 50.0% of version 1, +25.0 points (95% interval "
    )
    assert verdict.reason.endswith("): better, but min_gain asks for 26.0 points")


@pytest.mark.parametrize(
    ("guard", "kept"),
    [
        ({"metric": "kl", "max": 0.25}, True),
        ({"metric": "kl", "max": 0.24}, False),
        ({"metric": "kl", "max_rise": 0.25}, True),  # of the base itself it is 0
        ({"metric": "kl", "max_rise": 0.24}, False),
        ({"metric": "accuracy", "min": 1}, True),
        ({"metric": "completions/mean_length", "max_drop": 0}, True),
        ({"metric": "completions/clipped_ratio", "max": 0, "max_rise": 0}, True),
        ({"metric": "rewards/length/mean", "min": 0.1, "max": 1}, False),
        ({"set": "general", "metric": "accuracy", "min": 0}, False),  # nothing is known of that set
    ],
)
def test_every_guard_is_a_condition_of_its_own(guard: dict[str, Any], kept: bool) -> None:
    samples = fixed_samples({"base": [0] * 10, "trained": [1] * 10})
    verdict = _decide(promotion_config(guards=[{"metric": "reward", "min": 0}, guard]), samples, rival="base")
    assert verdict.accepted == kept
    assert [comparison.broken is None for comparison in verdict.comparisons] == [True, True, kept]
    assert (
        kept
        or f"; the guard {verdict.comparisons[2].rule.split(',')[0]} is broken: "
        in f"; {verdict.reason.split(': ', 1)[1]}"
    )


def test_prompts_that_were_not_scored_prove_nothing() -> None:
    samples = fixed_samples({"champion": [0] * 10, "trained": [None] * 6 + [1] * 4})
    assert not _decide(promotion_config(), samples).accepted
    verdict = _decide(promotion_config(), fixed_samples({"champion": [0] * 10, "trained": [None] * 10}))
    assert verdict.reason.endswith("no prompt was scored by both")


def test_a_refusal_says_what_would_have_been_found() -> None:
    samples = simulated_samples(0, {"champion": {}, "trained": {}}, num_prompts=100)
    verdict = _decide(promotion_config(), samples)
    detectable = 100 * verdict.comparisons[0].difference.minimum_detectable
    assert f"100 prompts find a true gain of {detectable:.1f} points with probability 0.8)" in verdict.reason
