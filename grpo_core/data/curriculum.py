"""Prompts worth training on: how often each prompt was solved, and what an epoch takes of them by that.

The rows of an epoch follow from the epoch's permutation, the pass rates, seed and epoch alone. The rates are those of a
fixed moment, `known_batches`, so that sampling ahead, a resumed training and one in turn take the same prompts. A
generation batch never has a prompt twice, since the same prompt in the same batch would be sampled alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from grpo_core.config.inputs import CurriculumConfig
from grpo_core.planning.plan import Plan
from grpo_core.system.files import naming, publish

UNKNOWN = 0.5  # the pass rate that a prompt without one is taken to have where prompts are put in order


@dataclass(frozen=True, eq=False)
class PassRates:
    """What is known about N prompts. A completion passes by the share of its reward's range that it got: 0 to 1."""

    passed: np.ndarray  # (N,) float64, sum over the prompt's completions
    completions: np.ndarray  # (N,) int64
    last_step: np.ndarray  # (N,) int64, the update for which it was sampled last; 0: before training, -1: not yet

    @property
    def known(self) -> np.ndarray:
        """Prompts that have a rate. (N,) bool"""
        return self.completions > 0

    @property
    def rate(self) -> np.ndarray:
        """Mean over each prompt's completions; NaN without any. (N,)"""
        return np.divide(self.passed, self.completions, out=np.full(len(self.passed), np.nan), where=self.known)


def no_rates(num_prompts: int) -> PassRates:
    return PassRates(np.zeros(num_prompts), np.zeros(num_prompts, np.int64), np.full(num_prompts, -1))


def with_samples(rates: PassRates, rows: np.ndarray, passed: np.ndarray, step: int) -> PassRates:
    """The rates with further completions. rows: the prompt of each (Q,); passed: 0 to 1, NaN if not scored (Q,)"""
    scored = ~np.isnan(passed)
    rows, passed = rows[scored], passed[scored]
    size = len(rates.passed)
    last_step = rates.last_step.copy()
    last_step[rows] = step
    return PassRates(
        rates.passed + np.bincount(rows, passed, size), rates.completions + np.bincount(rows, minlength=size), last_step
    )


def write_rates(rates: PassRates, path: Path) -> None:
    """Write the prompts that have a rate as Parquet: `row` of train.parquet, `rate`, `completions`, `last_step`."""
    known = rates.known
    columns = {"rate": rates.rate, "completions": rates.completions, "last_step": rates.last_step}
    table = pa.table({"row": known.nonzero()[0], **{name: values[known] for name, values in columns.items()}})
    temporary = path.with_suffix(".tmp")
    with naming(temporary):
        pq.write_table(table, temporary)
    publish(temporary, path)


def read_rates(path: Path, num_prompts: int) -> PassRates:
    """Read what `write_rates` wrote. `passed` is rebuilt from the mean, the same on every machine."""
    table = pq.read_table(path)
    row, rate, completions, last_step = (table[name].to_numpy() for name in ("row", "rate", "completions", "last_step"))
    found = no_rates(num_prompts)
    found.passed[row], found.completions[row], found.last_step[row] = rate * completions, completions, last_step
    return found


def known_batches(plan: Plan, epoch: int, ahead: int) -> int:
    """Generation batches whose rates an epoch is arranged by: all before its first batch, except the last `ahead`,
    which are not sampled yet when the epoch's first prompts begin."""
    return max(epoch * plan.rollouts_per_epoch - ahead, 0)


def arrange(
    rows: np.ndarray, rates: PassRates, config: CurriculumConfig, plan: Plan, seed: int, epoch: int
) -> np.ndarray:
    """What an epoch takes of its `rows` (N,), in training order: P prompts for each of its R generation batches. (P·R,)

    Without any rate: the first of the rows.
    """
    batches, size = plan.rollouts_per_epoch, plan.prompts_per_generation
    taken = rows[: batches * size]
    if config.kind == "none" or not rates.known.any():
        return taken
    if config.kind == "easy_to_hard":
        rate = np.where(rates.known, rates.rate, UNKNOWN)
        return taken[np.argsort(-rate[taken], kind="stable")]
    weights = variance(rates) if config.kind == "variance" else within(rates, config, size).astype(float)
    turns = expected_turns(weights[rows], batches * size, batches)
    random = np.random.default_rng([seed, epoch, 3])
    # A prompt's turns stand next to each other, and every R-th goes to the same batch: no batch has a prompt twice.
    drawn = np.repeat(rows, draw_turns(turns, random.random()))
    return drawn.reshape(size, batches).T[random.permutation(batches)].ravel()


def describe(rates: PassRates, rows: np.ndarray, config: CurriculumConfig) -> str:
    """What an epoch takes, and what it leaves out, as the end of a sentence."""
    taken, size = len(np.unique(rows)), len(rates.passed)
    if not rates.known.any():
        return f"{taken:,} of {size:,} prompts in random order: no pass rate is known yet"
    known = rows[rates.known[rows]]
    said = f"{taken:,} of {size:,} prompts"
    if len(known):
        said += f", mean pass rate {rates.rate[known].mean():.0%}"
    if band := config.band:
        below, above = (rates.rate < band[0]).sum(), (rates.rate > band[1]).sum()
        said += f"; {below:,} have a pass rate below {band[0]:g}, {above:,} above {band[1]:g}"
    return said


def variance(rates: PassRates) -> np.ndarray:
    """The expectation of p(1 − p), given that s of n completions passed and nothing else about p (a uniform prior):
    (s + 1)(n − s + 1) / ((n + 2)(n + 3)). Never 0: a prompt that was not solved yet is tried again. (N,)"""
    s, n = rates.passed, rates.completions
    return (s + 1) * (n - s + 1) / ((n + 2) * (n + 3))


def within(rates: PassRates, config: CurriculumConfig, least: int) -> np.ndarray:
    """The prompts within the band, and those without a rate. If they are fewer than `least`, the nearest to the band
    are taken too. (N,) bool"""
    away = distance(rates, config)
    return away <= np.partition(away, least - 1)[least - 1]


def distance(rates: PassRates, config: CurriculumConfig) -> np.ndarray:
    """How far each prompt's rate is from the band; 0 within it and without a rate. (N,)"""
    assert config.band is not None
    return np.abs(np.where(rates.known, rates.rate - np.clip(rates.rate, *config.band), 0.0))


def expected_turns(weights: np.ndarray, turns: int, most: int) -> np.ndarray:
    """Turns of each prompt in proportion to the weights, `turns` in all, at most `most` each: what is above that is
    shared among the others in the same way. (N,)"""
    found, open_ones = np.zeros(len(weights)), weights > 0
    while open_ones.any():
        left = turns - most * (~open_ones & (found > 0)).sum()
        found[open_ones] = weights[open_ones] * (left / weights[open_ones].sum())
        above = open_ones & (found > most)
        if not above.any():
            break
        found[above] = most
        open_ones &= ~above
    return found


def draw_turns(expected: np.ndarray, start: float) -> np.ndarray:
    """Whole numbers with these expectations over `start`, uniform in [0, 1): each is its expectation rounded up or
    down, and their sum is the same (systematic sampling, Madow 1949). (N,)"""
    expected = np.round(expected, 9)  # 3.9999999999 is 4
    whole = np.floor(expected)
    missing = round(expected.sum()) - int(whole.sum())
    parts = np.cumsum(expected - whole)
    bounds = np.minimum(np.floor(parts * (missing / (parts[-1] or 1.0)) + start), missing)
    bounds[-1] = missing
    return (whole + np.diff(bounds, prepend=0.0)).astype(np.int64)
