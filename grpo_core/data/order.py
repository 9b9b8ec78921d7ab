"""The prompts of each generation batch: a pure function of seed and number, so a run's place is one number."""

from __future__ import annotations

import bisect
import hashlib
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from grpo_core.planning.plan import Plan

# Rows of epochs, in training order, as a curriculum has arranged them (`data.curriculum`); None without one.
Arranged = Mapping[int, np.ndarray] | None
Group = tuple[int, int]  # the generation batch whose turn its prompt is, and the dataset row
LONGEST_COUNT = 10**8  # prompts, which take some seconds to count


@lru_cache(2)  # the epoch that is trained, and the one that is sampled ahead
def epoch_rows(plan: Plan, seed: int, epoch: int) -> np.ndarray:
    """Dataset rows of an epoch (from 0) in the order of training; no row comes twice. (N,)

    Each of several sources gives the next rows of its own shuffled circle: however many it gives per epoch, all of its
    rows come equally often, and an epoch continues where the previous one ended.
    """
    order = np.random.default_rng([seed, epoch]).permutation(plan.num_prompts)
    if not plan.sources:
        return order
    parts = []
    for place, (source, rows) in enumerate(zip(plan.sources, source_rows(plan), strict=True)):
        circle = np.random.default_rng([seed, place, 3]).permutation(rows)
        given = source.prompts_per_epoch
        parts.append(circle[(epoch * given + np.arange(given)) % len(rows)])
    return np.concatenate(parts)[order]


def source_rows(plan: Plan) -> list[range]:
    """The dataset rows of each source; all rows without sources."""
    ends = [*itertools.accumulate(source.num_prompts for source in plan.sources)] or [plan.num_prompts]
    return [range(start, end) for start, end in itertools.pairwise([0, *ends])]


def _shuffled(rows: Sequence[int] | np.ndarray, rng: np.random.Generator) -> Iterator[int]:
    """Yield the rows in random order, in the time and memory of those that are taken (the shuffle of Fisher and Yates,
    with the places that it has changed alone)."""
    changed = dict[int, int]()
    for last in range(len(rows) - 1, -1, -1):
        place = int(rng.integers(last + 1))
        chosen, moved = changed.get(place, place), changed.pop(last, last)
        if place != last:
            changed[place] = moved
        yield int(rows[chosen])


@dataclass(frozen=True)
class Schedule:
    """Which dataset rows each generation batch takes."""

    plan: Plan
    seed: int
    arranged: Arranged = None

    def prompts(self, index: int) -> list[int]:
        """Dataset rows of generation batch `index`: a chunk of its epoch's rows, the rest of which is dropped. (P,)"""
        epoch, chunk = divmod(index, self.plan.rollouts_per_epoch)
        rows = epoch_rows(self.plan, self.seed, epoch) if self.arranged is None else self.arranged[epoch]
        size = self.plan.prompts_per_generation
        return rows[chunk * size : (chunk + 1) * size].tolist()

    def groups(self, index: int) -> list[Group]:
        """The groups whose turn generation batch `index` is. (P,)"""
        return [(index, row) for row in self.prompts(index)]

    def fresh(self, index: int, used: Collection[int], replaced: Sequence[int]) -> list[int | None]:
        """Choose for each dataset row in `replaced`, whose group of generation batch `index` is replaced, another row
        of the same source, none of them among `used`; None if the source has no more. With a curriculum, they are
        prompts of that epoch."""
        sources = source_rows(self.plan)
        those: list[range] | list[np.ndarray] = sources
        if self.arranged is not None:
            of_epoch = np.unique(self.arranged[index // self.plan.rollouts_per_epoch])
            those = np.split(of_epoch, np.searchsorted(of_epoch, [rows.stop for rows in sources[:-1]]))
        orders = [_shuffled(rows, np.random.default_rng([self.seed, index, 2, n])) for n, rows in enumerate(those)]
        ends = [rows.stop for rows in sources]
        return [
            next((new for new in orders[bisect.bisect_right(ends, row)] if new not in used), None) for row in replaced
        ]

    def window(self, index: int, left: Sequence[Group], ahead: int) -> list[list[Group]]:
        """Return the groups that should have begun when generation batch `index` is taken: those `left` by the batch
        before, then batch by batch those that begin now (at a start: all of the first batches). `ahead`: generation
        batches that are sampled ahead of the one that is taken."""
        first, last = index + len(left) // self.plan.prompts_per_generation, index + ahead
        return [list(left), *(self.groups(turn) for turn in range(first, min(last + 1, self.plan.rollouts)))]


def source_counts(plan: Plan, seed: int) -> dict[str, dict[str, float]]:
    """Count for each source its prompts, those of an epoch, those that the run sees and drops (counted as `Plan` counts
    them for all), and passes over it. {} without sources, and for a run too long to be counted batch by batch."""
    epochs = range(0, plan.rollouts, plan.rollouts_per_epoch)
    if not plan.sources or len(epochs) * plan.num_prompts > LONGEST_COUNT:
        return {}
    starts = [rows.start for rows in source_rows(plan)]
    seen, dropped = np.zeros((2, len(starts)), dtype=np.int64)
    for epoch, first in enumerate(epochs):
        places = np.searchsorted(starts, epoch_rows(plan, seed, epoch), side="right") - 1
        batches = min(plan.rollouts - first, plan.rollouts_per_epoch)
        taken = batches * plan.prompts_per_generation
        seen += np.bincount(places[:taken], minlength=len(starts))
        if batches == plan.rollouts_per_epoch:
            dropped += np.bincount(places[taken:], minlength=len(starts))
    return {
        source.name: {
            "num_prompts": source.num_prompts,
            "prompts_per_epoch": source.prompts_per_epoch,
            "prompts_seen": int(s),
            "prompts_dropped": int(d),
            "passes": round(int(s) / source.num_prompts, 3),
        }
        for source, s, d in zip(plan.sources, seen, dropped, strict=True)
    }


def training_order(plan: Plan, seed: int, rollout: int) -> np.ndarray:
    """The rows of the generation batch, slice by slice, as the plan has them for W processes. (S, W, b)

    Shuffled, so that an update that takes only a part of the batch sees parts of many groups. An update has the same
    rows however it is cut into processes and micro-steps. The weights of bnpo follow from this cut; which process
    computes a row does not (`training.batch`).
    """
    order = np.random.default_rng([seed, rollout, 1]).permutation(plan.generation_batch_size)
    return order.reshape(plan.steps_per_generation, plan.num_processes, plan.per_device_train_batch_size)


def derive_seed(*parts: int) -> int:
    """A 48-bit seed from integers; equal parts give equal seeds on every machine and in every process.

    torch's generator reads all of its bits on a GPU, and only the lower 32 on a CPU.
    """
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=6)
    return int.from_bytes(digest.digest(), "big")
