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

from grpo_core.data.order import Group, Schedule
from grpo_core.distributed import range_of_process
from grpo_core.planning.sampling_ahead import batches_ahead
from grpo_core.rollout.types import Lookahead, Request, Sampling


@dataclass(frozen=True)
class Ahead:
    """The groups that are sampled ahead when a generation batch is taken from them."""

    lookahead: Lookahead
    begun: Sequence[Group]  # left by the batch before, in the order of the processes
    max_staleness: int  # hand-overs of weights within which a group that begins now must be taken


@dataclass(frozen=True)
class TakingSampler:
    """Sampler that begins what is not begun yet, and takes `count` groups: completions or, with tools or an
    environment, conversations."""

    ahead: Ahead
    count: int

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Any:
        self.ahead.lookahead.begin(requests, sampling, self.ahead.max_staleness)
        return self.ahead.lookahead.take(requests, sampling, self.count)


def windows(ahead: Ahead, schedule: Schedule, index: int, processes: int) -> list[list[Group]]:
    """Return the groups that each process should have begun when generation batch `index` is taken, process by process.

    A process has the same number of groups in every batch and takes that many, so what it leaves stays its own.
    """
    count = schedule.plan.prompts_per_generation
    parts = schedule.window(index, ahead.begun, batches_ahead(ahead.max_staleness))
    shares = [range_of_process(count, process, processes) for process in range(processes)]
    sized = [(groups, len(groups) // count) for groups in parts]  # with the number of batches that they are left of
    return [
        [group for groups, batches in sized for group in groups[share.start * batches : share.stop * batches]]
        for share in shares
    ]
