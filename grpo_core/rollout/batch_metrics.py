"""Metrics of a generation batch that one kind of value decides: rewards, what they logged, lengths, ages, and the
processes' own work, without the time in which they wait."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from statistics import median

import numpy as np
import torch

from grpo_core.algorithm.advantages import sample_std
from grpo_core.config.inputs import RewardConfig
from grpo_core.rewards.composition import counted
from grpo_core.rewards.trl_arguments import Logged
from grpo_core.rollout.types import Completion

PHASES = ("sampling", "rewards", "update")
TOKENS = "tokens"  # sampled by a process


def reward_metrics(rewards: Sequence[RewardConfig], given: np.ndarray) -> dict[str, float]:
    """Mean and deviation of each reward's values, which are NaN where it does not apply. given: (B, K)"""
    metrics = {}
    for reward, values, counts in zip(rewards, given.T, counted(given, rewards).T, strict=True):
        scored = ~np.isnan(values)
        if scored.any():
            metrics[f"rewards/{reward.name}/mean"] = values[scored].mean().item()
            metrics[f"rewards/{reward.name}/std"] = sample_std(torch.from_numpy(values[scored])).item()
            if reward.clip or reward.gate:
                metrics[f"rewards/{reward.name}/counted"] = counts[scored].mean().item()
    return metrics


def logged_metrics(logged: Sequence[Logged]) -> dict[str, float]:
    """Mean of each figure that rewards logged, over the completions of the calls that did: the same however they are
    divided among calls and processes, if a function logs means over the completions that it is called with."""
    names = sorted({name for each in logged for name in each.figures})
    found = {name: [each.figures[name] for each in logged if name in each.figures] for name in names}
    return {f"logged/{name}": sum(values) / len(values) for name, values in found.items()}


def age_metrics(completions: Sequence[Completion]) -> dict[str, float]:
    """Number of hand-overs of weights since a token was sampled: mean over the tokens, and of the oldest."""
    ages = [
        age
        for completion in completions
        for age, sampled in zip(completion.ages or [], completion.mask or itertools.repeat(1), strict=False)
        if sampled
    ]
    return (
        {"sampling/staleness/mean": sum(ages) / len(ages), "sampling/staleness/max": float(max(ages))} if ages else {}
    )


def length_metrics(completions: Sequence[Completion]) -> dict[str, float]:
    """Tokens that the policy sampled per completion: of all, and of those that ended by themselves."""
    lengths = torch.tensor([completion.sampled_tokens for completion in completions], dtype=torch.float32)
    truncated = torch.tensor([completion.truncated for completion in completions])
    terminated = lengths[~truncated]
    return {
        "completions/mean_length": lengths.mean().item(),
        "completions/min_length": lengths.min().item(),
        "completions/max_length": lengths.max().item(),
        "completions/clipped_ratio": truncated.float().mean().item(),
        "completions/mean_terminated_length": terminated.mean().item() if len(terminated) else 0.0,
        "completions/min_terminated_length": terminated.min().item() if len(terminated) else 0.0,
        "completions/max_terminated_length": terminated.max().item() if len(terminated) else 0.0,
    }


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
