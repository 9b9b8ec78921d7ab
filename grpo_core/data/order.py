"""Which prompts a generation batch takes: a pure function of seed and number, so a run's place is one number."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Collection, Mapping

import numpy as np

from grpo_core.planning.plan import Plan

# Rows of epochs, in training order, as a curriculum has arranged them (`data.curriculum`); None: without one.
Arranged = Mapping[int, np.ndarray] | None


def epoch_rows(plan: Plan, seed: int, epoch: int) -> np.ndarray:
    """Dataset rows of an epoch in training order: a permutation of its own. (N,)"""
    return np.random.default_rng([seed, epoch]).permutation(plan.num_prompts)


def rollout_prompts(plan: Plan, seed: int, rollout: int, arranged: Arranged = None) -> list[int]:
    """Dataset rows of generation batch `rollout`: chunks of the epoch's rows, the rest dropped. (P,)"""
    epoch, chunk = divmod(rollout, plan.rollouts_per_epoch)
    rows = epoch_rows(plan, seed, epoch) if arranged is None else arranged[epoch]
    size = plan.prompts_per_generation
    return rows[chunk * size : (chunk + 1) * size].tolist()


def fresh_prompts(
    plan: Plan, seed: int, rollout: int, used: Collection[int], count: int, arranged: Arranged = None
) -> list[int]:
    """Up to `count` dataset rows to replace groups of generation batch `rollout` with, none of them among `used`. With
    a curriculum, they are prompts of that epoch."""
    rows = np.arange(plan.num_prompts) if arranged is None else np.unique(arranged[rollout // plan.rollouts_per_epoch])
    order = np.random.default_rng([seed, rollout, 2]).permutation(rows)
    return list(itertools.islice((int(row) for row in order if row not in used), count))


def training_order(plan: Plan, seed: int, rollout: int) -> np.ndarray:
    """The rows of the generation batch, slice by slice, as the plan has them for W processes. (S, W, b)

    Shuffled, so that an update that takes only a part of the batch sees parts of many groups. An update has the same
    rows however it is cut into processes and micro-steps. The weights of bnpo follow from this cut; which process
    computes a row does not (`training.balance`).
    """
    order = np.random.default_rng([seed, rollout, 1]).permutation(plan.generation_batch_size)
    return order.reshape(plan.steps_per_generation, plan.num_processes, plan.per_device_train_batch_size)


def derive_seed(*parts: int) -> int:
    """A 48-bit seed from integers; equal parts give equal seeds on every machine and in every process.

    torch's generator reads all of its bits on a GPU, and only the lower 32 on a CPU.
    """
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=6)
    return int.from_bytes(digest.digest(), "big")
