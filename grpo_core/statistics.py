"""How sure a figure is, and whether one policy is better than another on the same prompts.

The unit is always the prompt: what a policy did on it, one number. NaN stands for a prompt that nothing scored.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

POWER = 0.8
BATCH = 10_000_000  # random numbers at once
Values = Sequence[float] | np.ndarray


@dataclass(frozen=True)
class Estimate:
    """A mean over prompts with the interval that covers the true one with probability `confidence`."""

    mean: float
    low: float
    high: float
    num_prompts: int


@dataclass(frozen=True)
class Difference:
    """A policy minus another, paired by prompt.

    low, high: two-sided interval of `confidence`. p_value: one-sided, of "not better" (see `paired_difference`).
    probability_better: share of bootstrap resamples of the prompts in which it is better, ties as halves.
    minimum_detectable: the true gain that a test at level 1 - confidence finds with probability POWER.
    """

    mean: float
    low: float
    high: float
    p_value: float
    probability_better: float
    minimum_detectable: float
    confidence: float
    num_prompts: int


def estimate(values: Values, confidence: float, resamples: int, seed: int, binary: bool) -> Estimate:
    """Of `binary` outcomes, which can be 0 or 1 only, the Wilson score interval (Wilson 1927); else the percentile
    bootstrap over prompts (Efron & Tibshirani 1993)."""
    values = _scored(values)
    if not len(values):
        return Estimate(math.nan, math.nan, math.nan, 0)
    mean = float(values.mean())
    if binary:
        interval = stats.binomtest(int(values.sum()), len(values)).proportion_ci(confidence, method="wilson")
        return Estimate(mean, float(interval.low), float(interval.high), len(values))
    low, high = _percentiles(_resampled_means(values, resamples, seed), confidence)
    return Estimate(mean, low, high, len(values))


def paired_difference(before: Values, after: Values, confidence: float, resamples: int, seed: int) -> Difference:
    """after − before over the prompts that both scored, which are resampled as pairs: what makes a prompt hard is
    common to both and cancels.

    The test is exact under "the two are exchangeable": where differences are −1, 0 or 1, McNemar's, by the binomial
    distribution of wins among the prompts that tell the two apart; else a permutation test over their signs (Pitman
    1937), with `resamples` draws.
    """
    differences = _scored(np.asarray(after, dtype=float) - np.asarray(before, dtype=float))
    if not len(differences):
        nan = math.nan
        return Difference(nan, nan, nan, 1.0, 0.5, nan, confidence, 0)
    means = _resampled_means(differences, resamples, seed)
    low, high = _percentiles(means, confidence)
    return Difference(
        mean=float(differences.mean()),
        low=low,
        high=high,
        p_value=_p_value(differences, resamples, seed),
        probability_better=float((means > 0).mean() + (means == 0).mean() / 2),
        minimum_detectable=_minimum_detectable(differences, confidence),
        confidence=confidence,
        num_prompts=len(differences),
    )


def pass_at_k(num_right: int, num_samples: int, k: int) -> float:
    """Probability that one of k samples is right, unbiased from n ≥ k of them (arXiv:2107.03374)."""
    return 1.0 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def _scored(values: Values) -> np.ndarray:
    values = np.asarray(values, dtype=float)
    return values[~np.isnan(values)]


def _resampled_means(values: np.ndarray, resamples: int, seed: int) -> np.ndarray:
    """Means over prompts drawn with replacement; where outcomes are few, by how often each of them is drawn."""
    distinct, counts = np.unique(values, return_counts=True)
    rng, n = np.random.default_rng(seed), len(values)
    few = len(distinct) < n / 8
    rows = max(1, BATCH // (len(distinct) if few else n))
    drawn = []
    for start in range(0, resamples, rows):
        size = min(rows, resamples - start)
        if few:
            drawn.append(rng.multinomial(n, counts / n, size=size) @ distinct / n)
        else:
            drawn.append(values[rng.integers(0, n, (size, n))].mean(axis=1))
    return np.concatenate(drawn)


def _percentiles(means: np.ndarray, confidence: float) -> tuple[float, float]:
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def _p_value(differences: np.ndarray, resamples: int, seed: int) -> float:
    told_apart = differences[differences != 0]
    if not len(told_apart):
        return 1.0
    if np.isin(told_apart, (-1.0, 1.0)).all():
        wins = int((told_apart > 0).sum())
        return float(stats.binomtest(wins, len(told_apart), alternative="greater").pvalue)
    rng, size, rows = np.random.default_rng(seed), np.abs(told_apart), max(1, BATCH // len(told_apart))
    reached = told_apart.sum() - 1e-9 * size.sum()
    as_far = 0
    for start in range(0, resamples, rows):
        signs = rng.integers(0, 2, (min(rows, resamples - start), len(size))) * 2 - 1
        as_far += int((signs @ size >= reached).sum())
    return (as_far + 1) / (resamples + 1)  # what was seen is itself one of the permutations


def _minimum_detectable(differences: np.ndarray, confidence: float) -> float:
    """By the normal approximation, with one win and one loss added (Agresti & Min 2005), so that a few prompts without
    a difference promise nothing, and the step of 1/N that an exact test loses to discreteness."""
    n, most = len(differences), float(np.abs(differences).max()) or 1.0
    deviation = float(np.std([*differences, most, -most]))
    needed = stats.norm.ppf(confidence) + stats.norm.ppf(POWER)
    return float(needed * deviation / math.sqrt(n) + most / n)
