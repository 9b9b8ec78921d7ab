"""A process that the others wait for again and again, named when it starts and stops lagging."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from grpo_core.rollout.process_work import PHASES
from grpo_core.system.progress import rank_name

STEPS = 5  # generation batches in a row
SHARE = 0.1  # of an update's time that the others wait for it


@dataclass
class Stragglers:
    """Find processes that cost more than SHARE of the time in STEPS generation batches in a row, in one phase."""

    streaks: dict[str, tuple[int | None, int]] = field(default_factory=dict)
    named: dict[str, int | None] = field(default_factory=dict)
    lost: dict[str, float] = field(default_factory=dict)

    def note(self, metrics: Mapping[str, float]) -> list[str]:
        """Return sentences on what changes with these metrics of an update. Updates that read the same generation batch
        as the one before have its figures again, and count once."""
        said = []
        for phase in PHASES:
            lost = metrics.get(f"time/{phase}/lost")
            if lost is None or lost == self.lost.get(phase):
                continue
            self.lost[phase] = lost
            rank = int(metrics[f"time/{phase}/slowest_rank"]) if lost > SHARE * metrics["step_time"] else None
            former, length = self.streaks.get(phase, (None, 0))
            length = length + 1 if rank == former else 1
            self.streaks[phase] = rank, length
            if length == STEPS and rank != (before := self.named.get(phase)):
                self.named[phase] = rank
                if rank is None:
                    said.append(f"straggler: {rank_name(before or 0)} is no longer slower than the others in {phase}")
                else:
                    said.append(
                        f"straggler: {rank_name(rank)} is slower than the others in {phase}, {STEPS} times in a row: "
                        f"they wait {lost:.2g} s of {metrics['step_time']:.2g} s for it"
                    )
        return said
