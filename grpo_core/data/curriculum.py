"""Pass rates of the prompts, and the choice of an epoch's prompts by them.

The rows of an epoch follow from the epoch's permutation, the pass rates, seed and epoch alone. The rates are those of a
fixed moment, `known_batches`, so that a training that samples ahead or was resumed takes the same prompts as any other.
A generation batch never has a prompt twice, since the same prompt in the same batch would be sampled alike. Each of
several sources keeps its places in every batch; a curriculum says which of the source's prompts stand there.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from grpo_core.config.inputs import CurriculumConfig
from grpo_core.config.run import RunConfig
from grpo_core.data.order import source_rows
from grpo_core.planning.plan import Plan
from grpo_core.planning.sampling_ahead import batches_ahead
from grpo_core.system.files import naming, publish

UNKNOWN = 0.5  # the pass rate that a prompt without one is taken to have where prompts are put in order


@dataclass(frozen=True, eq=False)
class PassRates:
    """Pass rates of N prompts. A completion passes by a share from 0 to 1: that of its reward's range which it got."""

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


def curriculum_notes(config: RunConfig, plan: Plan) -> list[str]:
    """A note that the curriculum has no effect, if every epoch begins before there are pass rates."""
    keys, train = config.data.curriculum, config.train
    last = (plan.rollouts - 1) // plan.rollouts_per_epoch
    known = known_batches(plan, last, batches_ahead(config.rollout.max_staleness))
    if keys.kind == "none" or keys.begins_with_probe or known:
        return []
    length = f"max_steps = {train.max_steps}" if train.max_steps else f"num_train_epochs = {train.num_train_epochs:g}"
    return [
        f"data.curriculum.kind is {keys.kind!r}, with data.curriculum.probe = 0 and train.{length}: no epoch begins "
        "with pass rates, so prompts are taken as with 'none'; set data.curriculum.probe to 4, or train for more epochs"
    ]


def arrange(
    rows: np.ndarray, rates: PassRates, config: CurriculumConfig, plan: Plan, seed: int, epoch: int
) -> np.ndarray:
    """Choose an epoch's prompts, in training order, given its `rows` (N,): P prompts for each of its R generation
    batches. (P·R,)

    A source, or a whole data set, without any pass rate takes the first of its rows.
    """
    taken = rows[: plan.rollouts_per_epoch * plan.prompts_per_generation]
    arranged, random = taken.copy(), np.random.default_rng([seed, epoch, 3])
    for own in source_rows(plan):
        places = _in_source(own, taken).nonzero()[0]
        if config.kind == "none" or not len(places) or not rates.known[own.start : own.stop].any():
            continue
        if config.kind == "easy_to_hard":
            rate = np.where(rates.known, rates.rate, UNKNOWN)[taken[places]]
            arranged[places] = taken[places][np.argsort(-rate, kind="stable")]
        else:
            given = rows[_in_source(own, rows)]
            candidates = np.concatenate([given, random.permutation(np.setdiff1d(own, given))])
            batches = places // plan.prompts_per_generation
            arranged[places] = _draw(candidates, batches, plan.rollouts_per_epoch, rates, config, random)
    return arranged


def _draw(
    candidates: np.ndarray,
    batches: np.ndarray,
    num_batches: int,
    rates: PassRates,
    config: CurriculumConfig,
    random: np.random.Generator,
) -> np.ndarray:
    """Choose the prompts for a source's places, given the batch of each place, ascending (C,). (C,)"""
    room = np.bincount(batches, minlength=num_batches)
    max_turns = len(batches) // room.max()  # with at most these, no prompt comes twice in a batch, however they fall
    min_prompts = -(-len(batches) // max_turns)
    weights = variance(rates)[candidates]
    if config.kind == "band":
        weights = within(distance(rates, config)[candidates], min_prompts).astype(float)
    turns = draw_turns(expected_turns(weights, len(batches), max_turns), random.random())
    return np.concatenate(deal(candidates, turns, room, random.permutation(num_batches)))


def deal(prompts: np.ndarray, turns: np.ndarray, room: np.ndarray, order: np.ndarray) -> list[np.ndarray]:
    """Give each prompt its turns in the batches that have the most room left, at most one in each; ties are broken by
    `order` (R,). If prompts can be dealt like this at all, this finds a way (Kleitman and Wang 1973).

    turns: of each prompt (N,); room: prompts of each batch (R,), as many in all. Returns the prompts of each batch.
    """
    found: list[list[int]] = [[] for _ in room]
    left = [(-int(size), int(place), batch) for batch, (size, place) in enumerate(zip(room, order, strict=True))]
    heapq.heapify(left)
    for prompt, count in zip(prompts.tolist(), turns.tolist(), strict=True):
        for free, place, batch in [heapq.heappop(left) for _ in range(count)]:
            found[batch].append(prompt)
            heapq.heappush(left, (free + 1, place, batch))
    return [np.array(batch, dtype=np.int64) for batch in found]


def _in_source(own: range, rows: np.ndarray) -> np.ndarray:
    """True for the rows that belong to the source with the rows `own`. (N,) bool"""
    return (own.start <= rows) & (rows < own.stop)


def describe(rates: PassRates, rows: np.ndarray, config: CurriculumConfig, plan: Plan) -> str:
    """Describe what an epoch takes and what it leaves out, source by source, as the end of a sentence."""
    if not plan.sources:
        return _describe(rates, rows, config, range(plan.num_prompts))
    parts = zip(plan.sources, source_rows(plan), strict=True)
    return "; ".join(f"{it.name}: {_describe(rates, rows[_in_source(own, rows)], config, own)}" for it, own in parts)


def _describe(rates: PassRates, rows: np.ndarray, config: CurriculumConfig, own: range) -> str:
    taken, rate = len(np.unique(rows)), rates.rate[own.start : own.stop]
    if np.isnan(rate).all():
        return f"{taken:,} of {len(own):,} prompts in random order: no pass rate is known yet"
    known = rows[rates.known[rows]]
    said = f"{taken:,} of {len(own):,} prompts"
    if len(known):
        said += f", mean pass rate {rates.rate[known].mean():.0%}"
    if band := config.band:
        below, above = (rate < band[0]).sum(), (rate > band[1]).sum()
        said += f"; {below:,} have a pass rate below {band[0]:g}, {above:,} above {band[1]:g}"
    return said


def variance(rates: PassRates) -> np.ndarray:
    """The expectation of p(1 − p), given that s of n completions passed and nothing else about p (a uniform prior):
    (s + 1)(n − s + 1) / ((n + 2)(n + 3)). Never 0: a prompt that was not solved yet is tried again. (N,)"""
    s, n = rates.passed, rates.completions
    return (s + 1) * (n - s + 1) / ((n + 2) * (n + 3))


def within(away: np.ndarray, least: int) -> np.ndarray:
    """True for the prompts within the band or without a rate, given each one's `distance`. If they are fewer than
    `least`, also for the nearest to the band. (N,) bool"""
    return away <= np.partition(away, least - 1)[least - 1]


def distance(rates: PassRates, config: CurriculumConfig) -> np.ndarray:
    """Distance of each prompt's rate from the band; 0 within it and without a rate. (N,)"""
    assert config.band is not None
    return np.abs(np.where(rates.known, rates.rate - np.clip(rates.rate, *config.band), 0.0))


def expected_turns(weights: np.ndarray, turns: int, max_turns: int) -> np.ndarray:
    """Turns of each prompt in proportion to the weights, `turns` in all, at most `max_turns` each: any excess is shared
    among the others in the same way. (N,)"""
    found, open_ones = np.zeros(len(weights)), weights > 0
    while open_ones.any():
        left = turns - max_turns * (~open_ones & (found > 0)).sum()
        found[open_ones] = weights[open_ones] * (left / weights[open_ones].sum())
        above = open_ones & (found > max_turns)
        if not above.any():
            break
        found[above] = max_turns
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
