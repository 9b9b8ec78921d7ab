"""Intervals of figures, and tests of whether one policy is better than another on the same prompts.

The unit is always the prompt, or a group of prompts: a policy's outcome on it, one number. NaN stands for a unit that
nothing scored.

Outcomes that can only be 0 or 1 have score intervals and an exact test. All others have one method: the Bayesian
bootstrap of the prompts (Rubin 1981), with one prompt more on which the outcome is the worst that is possible. Its
bound is Gaffke's (Gaffke 2005; Learned-Miller & Thomas, arXiv:1905.06208): for zeros and ones it is Clopper and
Pearson's exact bound, and no distribution on a bounded range is known that it fails to cover. Where the range of
outcomes is not known, the range of those that were seen stands in for it, and what is rarer than one in N stays unseen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import optimize, special  # scipy.stats takes half a second of each command that compares

POWER = 0.8
BINARY = (0.0, 1.0)
NODES = np.arange(0, 8, 0.04)  # of the integral in `tail`, see there
ROUNDING = 1e-9  # relative; gains of seeds that differ by less are equal: shares of right answers are rounded
SMALLEST = 1e-30  # share of the largest magnitude
BLOCK = 1000  # values whose terms are computed together, in the cache
Values = Sequence[float] | np.ndarray
Bounds = tuple[float, float]


@dataclass(frozen=True)
class Estimate:
    """A mean over units with the interval that covers the true one with probability `confidence`; the interval is NaN
    if all outcomes are equal and their range is not known."""

    mean: float
    low: float
    high: float
    num_units: int


@dataclass(frozen=True)
class Difference:
    """A policy minus another, paired by unit.

    low, high: two-sided interval of `confidence`; NaN if all outcomes are equal and their range is not known.
    p_value: one-sided, of "not better in the mean". probability_better: posterior probability that the mean difference
    is positive, by the Bayesian bootstrap with one win and one loss added. minimum_detectable: the true gain that the
    test finds with probability POWER.
    """

    mean: float
    low: float
    high: float
    p_value: float
    probability_better: float
    minimum_detectable: float
    confidence: float
    num_units: int


@dataclass(frozen=True)
class SeedDifference:
    """Trainings of one setting minus those of another, paired by seed, on the same prompts: Student's interval of
    `confidence`, and the one-sided p-value of "not better in the mean". NaN and 1 if the seeds show no spread."""

    mean: float
    low: float
    high: float
    p_value: float
    num_seeds: int


def estimate(values: Values, confidence: float, bounds: Bounds) -> Estimate:
    """Mean with its interval. `bounds`: lowest and highest value that an outcome can have, infinite if not known.

    Outcomes of 0 or 1 between bounds of 0 and 1: the Wilson score interval (Wilson 1927); all others: Gaffke's.
    """
    values = np.asarray(values, dtype=float)
    values = _finite(values[~np.isnan(values)])
    if not len(values):
        return Estimate(math.nan, math.nan, math.nan, 0)
    if _is_binary(values, bounds):
        rate = float(values.mean())
        return Estimate(rate, *_wilson_interval(rate, len(values), confidence), len(values))
    unit = _unit(values, bounds)
    values, (lowest, highest) = values / unit, np.array(seen_bounds(bounds, values)) / unit
    low, high = _interval(values, lowest, highest, confidence)
    return Estimate(float(values.mean()) * unit, low * unit, high * unit, len(values))


def paired_difference(
    before: Values, after: Values, confidence: float, bounds: Bounds, level: float | None = None
) -> Difference:
    """after − before over the prompts that both scored: what makes a prompt hard is common to both and cancels.

    `bounds`: lowest and highest value that an outcome can have, infinite if not known. `level`: of the test that
    `minimum_detectable` is about; default: 1 − confidence. Outcomes of 0 or 1 between bounds of 0 and 1: Tango's score
    interval (Tango 1998) and McNemar's exact test; all others: Gaffke's bound and the test that inverts it.
    """
    before, after = np.asarray(before, dtype=float), np.asarray(after, dtype=float)
    if before.shape != after.shape or before.ndim != 1:
        raise ValueError(f"outcomes of shape {before.shape} and {after.shape} are no pairs; give one value per prompt")
    compared = ~(np.isnan(before) | np.isnan(after))
    both = _finite(np.concatenate([before[compared], after[compared]]))
    unit = _unit(both, bounds)
    differences = after[compared] / unit - before[compared] / unit
    n = len(differences)
    if not n:
        nan = math.nan
        return Difference(nan, nan, nan, 1.0, 0.5, nan, confidence, 0)
    lowest, highest = seen_bounds(bounds, both)
    largest = highest / unit - lowest / unit
    if _is_binary(both, bounds):
        wins, losses = int((differences > 0).sum()), int((differences < 0).sum())
        low, high = np.array(_score_interval(wins, losses, n, confidence)) / unit
        p_value = float(special.bdtrc(wins - 1, wins + losses, 0.5))  # of as many wins or more
    else:
        low, high = _interval(differences, -largest, largest, confidence)
        p_value = tail(np.append(differences, -largest))
    return Difference(
        mean=float(differences.mean()) * unit,
        low=float(low) * unit,
        high=float(high) * unit,
        p_value=p_value,
        probability_better=1 - tail(np.append(differences, [-largest, largest])) if largest else 0.5,
        minimum_detectable=_minimum_detectable(differences, largest, level or 1 - confidence) * unit,
        confidence=confidence,
        num_units=n,
    )


def seed_difference(before: Values, after: Values, confidence: float) -> SeedDifference:
    """after − before, one value per seed: only the uncertainty about other seeds is counted. NaN and 1 if the seeds
    show no spread beyond rounding."""
    differences = np.asarray(after, dtype=float) - np.asarray(before, dtype=float)
    n = len(differences)
    mean = float(differences.mean()) if n else math.nan
    error = float(differences.std(ddof=1)) / math.sqrt(n) if n > 1 else 0.0
    if error <= ROUNDING * max([*np.abs(before), *np.abs(after)], default=0.0):
        return SeedDifference(mean, math.nan, math.nan, 1.0, n)
    reach = float(special.stdtrit(n - 1, (1 + confidence) / 2)) * error  # quantile of Student's distribution
    return SeedDifference(mean, mean - reach, mean + reach, float(special.stdtr(n - 1, -mean / error)), n)


def pass_at_k(num_right: int, num_samples: int, k: int) -> float:
    """Probability that one of k samples is right, unbiased from n ≥ k of them (arXiv:2107.03374)."""
    return 1.0 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def seen_bounds(bounds: Bounds, values: np.ndarray) -> Bounds:
    """The bounds, an infinite one replaced by the outermost of `values`."""
    low, high = float(np.nanmin(values)), float(np.nanmax(values))
    lowest = min(bounds[0], low) if math.isfinite(bounds[0]) else low
    highest = max(bounds[1], high) if math.isfinite(bounds[1]) else high
    return lowest, highest


def _finite(values: np.ndarray) -> np.ndarray:
    if np.isinf(values).any():
        raise ValueError("an outcome is infinite, which has no mean; give NaN for a prompt that nothing scored")
    return values


def _is_binary(values: np.ndarray, bounds: Bounds) -> bool:
    return tuple(bounds) == BINARY and bool(np.isin(values, BINARY).all())


def _unit(*values: np.ndarray | Bounds) -> float:
    """The power of two above the largest finite magnitude: in this unit no square overflows, and none that matters
    vanishes."""
    finite = np.concatenate([np.asarray(each, dtype=float) for each in values])
    largest = np.abs(finite[np.isfinite(finite)]).max(initial=0.0)
    return math.ldexp(1.0, min(math.frexp(largest)[1], 1023))


def _interval(values: np.ndarray, lowest: float, highest: float, confidence: float) -> tuple[float, float]:
    """Gaffke's bound on either side; NaN if the range is one point."""
    if lowest == highest:
        return math.nan, math.nan
    outside = (1 - confidence) / 2
    return _quantile(np.append(values, lowest), outside), -_quantile(-np.append(values, highest), outside)


def _quantile(values: np.ndarray, share: float) -> float:
    """`share`-quantile of the mean of `values` with random weights, see `tail`."""
    low, high = float(values.min()), float(values.max())
    if low == high:
        return low
    error = float(values.std()) / math.sqrt(len(values))

    def excess(mean: float) -> float:  # on the normal scale, on which it is nearly a line
        return float(special.ndtri(np.clip(tail(values - mean), 1e-300, 1 - 1e-16)) - special.ndtri(share))

    near = float(values.mean()) + float(special.ndtri(share)) * error
    ends = max(low, near - 2 * error), min(high, near + 2 * error)
    if not excess(ends[0]) < 0 < excess(ends[1]):
        ends = low, high
    return float(optimize.brentq(excess, *ends, xtol=max(1e-6 * error, 1e-15 * (high - low))))


def tail(values: np.ndarray) -> float:
    """P(Σ w_i · values_i ≤ 0) for weights w that are uniform on the simplex, as the Bayesian bootstrap draws them.

    Such weights are independent Exp(1) variables over their sum, so this is P(X ≤ 0) of X = Σ E_i · values_i, whose
    moment generating function is M(s) = Π 1 / (1 − s · values_i), and with a path through any s < 0 where M exists

        P(X ≤ 0) = −1 / (2πi) · ∫ M(z) / z dz from s − i∞ to s + i∞.

    The path goes through the saddle point and bends with the curvature of steepest descent, away from which the
    integrand oscillates: the sum is right to 0.2 % of itself however small it is (seen up to 100,000 values). A value
    below SMALLEST of the largest magnitude counts as 0.
    """
    values = np.where(np.abs(values) < SMALLEST * np.abs(values).max(), 0.0, values)
    distinct, counts = np.unique(values, return_counts=True)
    if distinct[-1] <= 0:
        return 1.0
    if distinct[0] >= 0:
        return 0.0
    return _lower_tail(distinct, counts) if counts @ distinct > 0 else 1 - _lower_tail(-distinct, counts)


def _lower_tail(distinct: np.ndarray, counts: np.ndarray) -> float:
    """P(X ≤ 0), see `tail`, where the mean of X is not below 0: else the saddle point is next to the pole at 0."""
    pole = 1 / distinct.min()

    def slope(place: float) -> float:  # of log |M(s) / s|, whose least value is the saddle point
        s = pole * special.expit(place)
        return float((counts * distinct / (1 - s * distinct)).sum() - 1 / s)

    saddle = pole * special.expit(optimize.brentq(slope, -100, 30, xtol=1e-3))
    terms = distinct / (1 - saddle * distinct)
    width = 1 / math.sqrt((counts * terms**2).sum() + 1 / saddle**2)
    bend = min(0.0, 2 / 3 * width**3 * float((counts * terms**3).sum() - 1 / saddle**3))  # third derivative · width / 3
    z = saddle + width * (1j * np.sinh(NODES) + bend * (np.cosh(NODES) - 1))
    steps = width * (1j * np.cosh(NODES) + bend * np.sinh(NODES))
    blocks = (slice(start, start + BLOCK) for start in range(0, len(distinct), BLOCK))
    log_m = -sum(counts[block] @ _log(1 - distinct[block, None] * z) for block in blocks)
    heights = (np.exp(log_m - np.log(-z)) * steps).imag
    return float(min(1.0, (heights.sum() - heights[0] / 2) * NODES[1] / math.pi))


def _log(z: np.ndarray) -> np.ndarray:
    """Logarithm of complex numbers whose squares do not overflow, in half of the time of `np.log`."""
    return np.log(z.real**2 + z.imag**2) / 2 + 1j * np.arctan2(z.imag, z.real)


def _wilson_interval(rate: float, n: int, confidence: float) -> tuple[float, float]:
    """Interval of the probability behind a rate of n, by inverting the score test (Wilson 1927)."""
    z = float(special.ndtri((1 + confidence) / 2))
    center, half = rate + z**2 / (2 * n), z * math.sqrt(rate * (1 - rate) / n + z**2 / (4 * n**2))
    low, high = (center - half) / (1 + z**2 / n), (center + half) / (1 + z**2 / n)
    return low if rate > 0 else 0.0, high if rate < 1 else 1.0


def _score_interval(wins: int, losses: int, n: int, confidence: float) -> tuple[float, float]:
    """Interval of the mean of n paired differences, (wins − losses) / n, by inverting the score test (Tango 1998)."""
    z = float(special.ndtri((1 + confidence) / 2))
    return _score_bound(wins, losses, n, z), -_score_bound(losses, wins, n, z)


def _score_bound(wins: int, losses: int, n: int, z: float) -> float:
    """Lower bound of that interval. `z`: quantile of the normal distribution."""
    if losses == n:
        return -1.0

    def excess(mean: float) -> float:
        b = (2 * n - wins + losses) * mean - wins - losses
        # Probability of a loss, by maximum likelihood for this mean difference.
        loss = (math.sqrt(max(0.0, b * b + 8 * n * losses * mean * (1 - mean))) - b) / (4 * n)
        return wins - losses - n * mean - z * math.sqrt(max(0.0, n * (2 * loss + mean * (1 - mean))))

    # Just below the mean that was seen: without a win or a loss that is a root of its own.
    return float(optimize.brentq(excess, -1.0, (wins - losses) / n - 1e-9))


def _minimum_detectable(differences: np.ndarray, largest: float, level: float) -> float:
    """True gain that is detected with probability POWER, by the normal approximation, with one win and one loss added
    (Agresti & Min 2005), so that a few prompts without a difference promise nothing, and the step of 1/N that an exact
    test loses to discreteness or Gaffke's to the prompt that it adds. `largest`: the largest possible difference."""
    n = len(differences)
    deviation = float(np.std([*differences, largest, -largest]))
    needed = float(special.ndtri(POWER) - special.ndtri(level))
    return float(needed * deviation / math.sqrt(n) + largest / n)
