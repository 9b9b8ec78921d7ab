"""Sampling ahead of the training: which groups are begun, and which of them a generation batch takes.

Several generation batches' prompts are being sampled. A batch takes the groups that are finished first; a group that
would otherwise be trained later than `max_staleness` hand-overs of weights after it began is waited for. Thus long
completions are trained late, but none is lost: each prompt is trained as often as the plan says.

If `max_staleness` is lowered during the training, nothing begins until few enough groups are left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from grpo_core.config.run import RunConfig
from grpo_core.data.order import Arranged, derive_seed, rollout_prompts
from grpo_core.data.prompts import Prompts
from grpo_core.distributed import range_of_process
from grpo_core.planning.plan import Plan
from grpo_core.planning.sampling_ahead import batches_ahead
from grpo_core.rollout.requests import own_limit
from grpo_core.rollout.types import Lookahead, Request, Sampling

Group = tuple[int, int]  # the generation batch whose turn its prompt was, and the dataset row


@dataclass(frozen=True)
class Ahead:
    """The groups that are sampled ahead when a generation batch is taken from them."""

    lookahead: Lookahead
    begun: Sequence[Group]  # left by the batch before
    max_staleness: int  # hand-overs of weights within which a group that begins now must be taken


@dataclass(frozen=True)
class TakingSampler:
    """Sampler that takes `count` begun groups: completions or, with tools or an environment, conversations."""

    engine: Lookahead
    count: int

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Any:
        return self.engine.take(requests, sampling, self.count)


def windows(
    left: Sequence[Group],
    plan: Plan,
    seed: int,
    index: int,
    max_staleness: int,
    processes: int,
    arranged: Arranged = None,
) -> list[list[Group]]:
    """Return the groups that each process should have begun when generation batch `index` is taken: those `left` by
    the batch before, in the order of the processes, and those that begin now (at a start: all of the first batches).

    A process has the same number of groups in every batch and takes that many, so what it leaves stays its own.
    `arranged`: see `rollout_prompts`.
    """
    count = plan.prompts_per_generation
    first, last = index + len(left) // count, index + batches_ahead(max_staleness)
    turns = range(first, min(last + 1, plan.rollouts))
    parts = [list(left), *([(turn, row) for row in rollout_prompts(plan, seed, turn, arranged)] for turn in turns)]
    shares = [range_of_process(count, process, processes) for process in range(processes)]
    return [
        [group for groups in parts for group in groups[_part_of_batches(share, len(groups) // count)]]
        for share in shares
    ]


def _part_of_batches(share: range, batches: int) -> slice:
    """Slice of a process's groups among those left of `batches` batches; `share`: its groups in one batch."""
    return slice(share.start * batches, share.stop * batches)


def requests_of(
    window: Sequence[Group], prompts: Prompts, plan: Plan, config: RunConfig, attempt: int
) -> list[Request]:
    """Return the groups as requests, with seeds that do not depend on when they are taken."""
    return [
        Request(
            prompts.ids[row],
            plan.num_generations,
            derive_seed(config.seed, turn, attempt, row),
            own_limit(config, prompts.rows[row]),
            row=row,
        )
        for turn, row in window
    ]
