"""Advice on how far a training should sample ahead and from how many servers, simulated from an earlier training's
completions and seconds. Imports no torch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import linear_regression, mean
from typing import Any

from grpo_core.config.run import RunConfig
from grpo_core.planning.plan import Plan
from grpo_core.planning.sampling_ahead import Group, Simulated, Speed, simulate

CPU_SLOTS, GPU_SLOTS = 128, 256  # sequences that vLLM samples together by default; more on a large GPU
AHEAD = (0, 1, 2, 4, 8)  # rollout.max_staleness
BATCHES = 16  # generation batches that are simulated
AS_GOOD = 0.95  # of the most updates per hour
FORWARD = 1 / 3  # of the time of a forward and backward pass


@dataclass(frozen=True)
class SampledBatch:
    """A generation batch of a training that sampled and trained in turn."""

    lengths: Sequence[Sequence[int]]  # tokens of each completion, by group
    prompt_tokens: float  # mean
    sample_seconds: float
    train_seconds: float  # without sampling and rewards
    other_seconds: float = 0.0  # of the trainer, such as those of rewards

    @property
    def tokens(self) -> int:
        return sum(map(sum, self.lengths))


@dataclass(frozen=True)
class EarlierSampling:
    """Generation batches of an earlier training, and the vLLM servers that it sampled from."""

    batches: Sequence[SampledBatch]
    servers: int
    processes: int
    how: str


def fit_speed(earlier: EarlierSampling, slots: int) -> Speed:
    """The speed of trainer and servers, by least squares over the generation batches.

    Sampling a batch takes step · (its longest completion) + sequence · (its tokens per server), except if sequences
    wait for a slot. Prefilling is taken to be as fast as a forward pass of the trainer.
    """
    batches = earlier.batches
    tokens = [batch.tokens / earlier.servers for batch in batches]
    steps = [max(max(map(max, batch.lengths)), own / slots) for batch, own in zip(batches, tokens, strict=True)]
    step, sequence = _fit_line(
        [own / count for own, count in zip(tokens, steps, strict=True)],
        [batch.sample_seconds / count for batch, count in zip(batches, steps, strict=True)],
    )
    update, token = _fit_line(
        [batch.tokens for batch in batches], [batch.train_seconds + batch.other_seconds for batch in batches]
    )
    passed = [batch.tokens + len(batch.lengths) * batch.prompt_tokens for batch in batches]
    trained = sum(batch.train_seconds for batch in batches)
    prefill = FORWARD * trained * earlier.processes / sum(passed)
    return Speed(step=step, sequence=sequence, prefill=prefill, update=update, token=token)


def advise(config: RunConfig, plan: Plan, earlier: EarlierSampling, slots: int) -> dict[str, Any]:
    """Updates per hour for each `max_staleness` in AHEAD, the least that is about as fast as the fastest, and for
    numbers of servers the share of its time that the trainer then waits for completions; with `how` it was made.
    `slots`: sequences that a copy of the model samples together."""
    slots *= config.rollout.vllm_data_parallel_size
    speed = fit_speed(earlier, slots)
    own = max(len(config.rollout.vllm_server_base_urls), config.rollout.vllm_num_servers)
    groups = _groups(earlier.batches, plan, config.rollout.max_completion_length)
    prompt_tokens = mean(batch.prompt_tokens for batch in earlier.batches)

    def run(staleness: int, servers: int) -> Simulated:
        return simulate(groups, plan.prompts_per_generation, staleness, servers, slots, speed, prompt_tokens)

    per_batch = plan.max_steps / plan.rollouts
    paces = {staleness: per_batch * run(staleness, own).batches_per_hour for staleness in AHEAD}
    chosen = _least_as_good(paces)
    fed = {servers: run(chosen, servers) for servers in sorted({1, 2, own, 2 * own})}
    return {
        "updates_per_hour": paces,
        "max_staleness": chosen,
        "servers": _least_as_good({servers: found.batches_per_hour for servers, found in fed.items()}),
        "waiting_share": {servers: found.waiting_share for servers, found in fed.items()},
        "how": (
            f"simulated, not run, with {own} server{'s' * (own > 1)}: {earlier.how}; {slots} sequences per server, "
            "prefilling as fast as the trainer's forward pass, without the seconds that servers stand still for weights"
        ),
    }


def _groups(batches: Sequence[SampledBatch], plan: Plan, longest: int) -> list[Group]:
    """Groups of the plan's size for BATCHES generation batches: those of the earlier training, repeated as needed."""
    found = itertools.cycle(group for batch in batches for group in batch.lengths)
    return [
        [[(min(length, longest), 0.0)] for length in itertools.islice(itertools.cycle(group), plan.num_generations)]
        for group in itertools.islice(found, BATCHES * plan.prompts_per_generation)
    ]


def _least_as_good(paces: dict[int, float]) -> int:
    """The least number whose pace is about as good as the best."""
    return min(number for number, pace in paces.items() if pace >= AS_GOOD * max(paces.values()))


def _fit_line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Fit y = a + b·x by least squares, with neither a nor b below 0. Returns a and b."""
    if len(set(x)) > 1:
        slope, intercept = linear_regression(x, y)
        if slope > 0:
            return (intercept, slope) if intercept >= 0 else (0.0, linear_regression(x, y, proportional=True).slope)
    return mean(y), 0.0
