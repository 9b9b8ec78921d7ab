"""How evenly the processes of a training are occupied by their own work, not counting the time in which they wait."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

PHASES = ("sampling", "rewards", "update")
TOKENS = "tokens"  # sampled by a process


def work_metrics(work: Sequence[Mapping[str, float]], per_machine: int) -> dict[str, float]:
    """Return for each phase the process that worked longest, and how many seconds longer than the others' median; for
    each of several machines, tokens sampled per second of sampling. Empty for a single process.

    `work`: for each process, seconds by phase, and tokens. `per_machine`: processes on each machine, in a row.
    """
    metrics: dict[str, float] = {}
    if len(work) == 1 or not any(own.get("sampling") for own in work):
        return metrics
    for phase in PHASES:
        seconds = [own.get(phase, 0.0) for own in work]
        slowest = max(range(len(work)), key=seconds.__getitem__)
        longest = seconds.pop(slowest)
        metrics[f"time/{phase}/slowest_rank"] = slowest
        metrics[f"time/{phase}/lost"] = longest - median(seconds)
    machines = [work[first : first + per_machine] for first in range(0, len(work), per_machine)]
    for number, machine in enumerate(machines if len(machines) > 1 else []):
        seconds_there = max(own.get("sampling", 0.0) for own in machine)
        metrics[f"time/machine_{number}/tokens_per_second"] = (
            sum(own.get(TOKENS, 0.0) for own in machine) / seconds_there if seconds_there else 0.0
        )
    return metrics
