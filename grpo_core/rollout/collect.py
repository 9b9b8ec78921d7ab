"""One generation batch, from prompts to rollout: sample, score, compare within groups; shared over all processes."""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from grpo_core.algorithm.advantages import Advantages, group_advantages, sample_std
from grpo_core.config.algorithm import AlgorithmConfig
from grpo_core.config.inputs import RewardConfig
from grpo_core.config.run import RunConfig
from grpo_core.data.chat import decode_completions, text_of
from grpo_core.data.order import derive_seed, fresh_prompts, rollout_prompts
from grpo_core.data.prompts import Prompts
from grpo_core.distributed import gathered, processes_per_machine, share
from grpo_core.errors import NotFiniteError, RewardError
from grpo_core.model.sequences import pad
from grpo_core.planning.plan import Plan
from grpo_core.rewards.composition import counted
from grpo_core.rewards.contract import Reward
from grpo_core.rewards.scoring import Batch, score_arriving
from grpo_core.rollout.process_work import TOKENS, work_metrics
from grpo_core.rollout.requests import training_sampling
from grpo_core.rollout.types import Completion, Engine, Finished, GenerationBatch, Lookahead, Request, Sampling
from grpo_core.system.progress import phase, seconds_of_work


@dataclass(frozen=True)
class Sample:
    """One scored completion, as it travels between processes and into the records."""

    row: int  # of the dataset
    completion: Completion
    text: str
    rewards: list[float]  # K, NaN for None


def collect(
    index: int,
    config: RunConfig,
    plan: Plan,
    prompts: Prompts,
    tokenizer: Any,
    rewards: Sequence[Reward],
    engine: Engine,
    attempt: int = 0,
) -> tuple[GenerationBatch, list[Sample]]:
    """Generation batch `index`, and its samples in the same order.

    Every process samples and scores its share, and all get the whole. Another `attempt` draws other samples of the same
    prompts.
    """
    g = plan.num_generations
    sampling = training_sampling(config.rollout)
    seconds = {"time/generate": 0.0, "time/score": 0.0}
    work: list[list[dict[str, float]]] = []  # of each process, in each draw

    def draw(rows: Sequence[int]) -> list[Sample]:
        """G scored completions of each row, over all processes."""
        start = time.perf_counter()
        mine = share(len(rows) * g)
        requests, request_rows = _requests(rows, prompts, g, (config.seed, index, attempt), mine)
        drawn, generated, worked = share_samples(
            lambda: sample_and_score(engine, requests, request_rows, sampling, prompts, tokenizer, rewards)
        )
        seconds["time/generate"] += generated
        seconds["time/score"] += time.perf_counter() - start - generated
        work.append(worked)
        return drawn

    scheduled = rollout_prompts(plan, config.seed, index)
    samples = draw(scheduled)
    advantages = _advantages(samples, config, plan)
    first_reward, sampled = advantages.rewards.nanmean().item(), list(samples)
    used = set(scheduled)
    for _ in range(config.rollout.max_resample_times if config.rollout.dynamic_sample else 0):
        silent = (advantages.group_std == 0).nonzero().flatten().tolist()
        fresh = fresh_prompts(plan, config.seed, index, used, len(silent))
        if not fresh:
            break
        used.update(fresh)
        replacements = draw(fresh)
        sampled += replacements
        for group, start in zip(silent, range(0, len(replacements), g), strict=False):
            samples[group * g : (group + 1) * g] = replacements[start : start + g]
        advantages = _advantages(samples, config, plan)

    metrics = {
        "reward": advantages.rewards.nanmean().item(),
        "reward_std": sample_std(advantages.rewards).item(),
        "frac_reward_zero_std": (advantages.group_std == 0).float().mean().item(),
        **_reward_metrics(config.rewards, _matrix(samples)),
        **_length_metrics([sample.completion for sample in samples]),
        **seconds,
        **work_metrics([sum(map(Counter, own), Counter()) for own in zip(*work, strict=True)], processes_per_machine()),
    }
    if config.rollout.dynamic_sample:
        if not math.isnan(first_reward):
            metrics["dynamic_sampling/first_reward"] = first_reward
        metrics["dynamic_sampling/resampled_groups"] = (len(sampled) - len(samples)) / g
    completions = [sample.completion for sample in samples]
    sampling_logprobs = pad([completion.logprobs for completion in completions], torch.float32)
    if not sampling_logprobs.isfinite().all():
        raise NotFiniteError(f"rollout {index}: the policy's log-probabilities of its own samples are not finite")
    trained = [_is_trained(completion, config.algorithm) for completion in completions]
    batch = GenerationBatch(
        index=index,
        scheduled_rows=scheduled,
        prompt_ids=[prompts.ids[sample.row] for sample in samples],
        prompt_of=torch.tensor([sample.row for sample in samples]),
        completion_ids=pad([completion.ids for completion in completions], torch.int64),
        completion_mask=pad(trained, torch.float32),
        completion_lengths=torch.tensor([len(completion.ids) for completion in completions]),
        truncated=torch.tensor([completion.truncated for completion in completions]),
        sampling_logprobs=sampling_logprobs,
        advantages=advantages.advantages,
        sampled_completions=len(sampled),
        sampled_tokens=sum(len(sample.completion.ids) for sample in sampled),
        metrics=metrics,
    )
    return batch, samples


def begin(index: int, config: RunConfig, plan: Plan, prompts: Prompts, engine: Lookahead, attempt: int) -> None:
    """Start sampling this process's share of generation batch `index`; `collect` takes it up later."""
    rows, g = rollout_prompts(plan, config.seed, index), plan.num_generations
    requests, _ = _requests(rows, prompts, g, (config.seed, index, attempt), share(len(rows) * g))
    engine.begin(requests, training_sampling(config.rollout))


def _matrix(samples: Sequence[Sample]) -> np.ndarray:
    """What the rewards gave, NaN for None. (B, K)"""
    return np.array([sample.rewards for sample in samples], dtype=np.float64)


def _advantages(samples: Sequence[Sample], config: RunConfig, plan: Plan) -> Advantages:
    return group_advantages(
        torch.from_numpy(counted(_matrix(samples), config.rewards)),
        torch.tensor([reward.weight for reward in config.rewards], dtype=torch.float64),
        plan.num_generations,
        config.algorithm.scale_rewards,
        aggregation=config.algorithm.multi_objective_aggregation,
        estimator=config.algorithm.advantage_estimator,
    )


def sample_and_score(
    engine: Engine,
    requests: Sequence[Request],
    rows: Sequence[int],
    sampling: Sampling,
    prompts: Prompts,
    tokenizer: Any,
    rewards: Sequence[Reward],
) -> tuple[list[Sample], float]:
    """The requests' completions, scored, and the seconds until the last was sampled; `rows` are the requests'.

    Asynchronous rewards work on the requests that are finished while the others are sampled.
    """
    start, ended = time.perf_counter(), 0.0

    def sampled() -> Generator[list[Finished], None, None]:
        nonlocal ended
        yield from engine.generate(requests, sampling)
        ended = time.perf_counter()

    def batch_of(finished: list[Finished]) -> Batch:
        places = [rows[number] for number, completions in finished for _ in completions]
        data, prompt_ids = [prompts.rows[row] for row in places], [prompts.ids[row] for row in places]
        ids = [completion.ids for _, completions in finished for completion in completions]
        return Batch(data, decode_completions(data, prompt_ids, ids, tokenizer), ids)

    finished, batch, columns = score_arriving(rewards, sampled(), batch_of)
    scored = zip(batch.completions, zip(*columns, strict=True), strict=True)
    samples = {
        number: [
            Sample(rows[number], completion, text_of(written), list(values))
            for completion, (written, values) in zip(completions, scored, strict=False)
        ]
        for number, completions in finished
    }
    return [sample for number in range(len(requests)) for sample in samples[number]], ended - start


@phase("sampling")
def share_samples(
    draw: Callable[[], tuple[list[Sample], float]],
) -> tuple[list[Sample], float, list[dict[str, float]]]:
    """Samples of all processes, the seconds of this one, and each one's work since the last call, for `work_metrics`.
    Raises RewardError in all processes if one raises it."""
    drawn: Sequence[Sample | RewardError]
    try:
        drawn, seconds = draw()
    except RewardError as error:
        drawn, seconds = [error], 0.0
    tokens = sum(len(sample.completion.ids) for sample in drawn if isinstance(sample, Sample))
    shares = gathered([([*drawn], seconds_of_work() | {TOKENS: float(tokens)})])
    found = [sample for share, _ in shares for sample in share]
    for problem in found:
        if isinstance(problem, RewardError):
            raise problem
    return [sample for sample in found if isinstance(sample, Sample)], seconds, [work for _, work in shares]


def _requests(
    rows: Sequence[int], prompts: Prompts, g: int, seeds: tuple[int, ...], mine: range
) -> tuple[list[Request], list[int]]:
    """Requests for the completions `mine` of the rows' groups, and their dataset rows.

    A group may straddle two processes; its seeds go on where the other process's end.
    """
    requests: list[Request] = []
    request_rows: list[int] = []
    for position, members in itertools.groupby(mine, lambda completion: completion // g):
        row, (first, *others) = rows[position], members
        requests.append(Request(prompts.ids[row], 1 + len(others), derive_seed(*seeds, row) + first % g))
        request_rows.append(row)
    return requests, request_rows


def _is_trained(completion: Completion, config: AlgorithmConfig) -> list[float]:
    """1 per token that is trained, 0 per token that is not: with mask_truncated_completions, all that were cut off."""
    return [float(not (config.mask_truncated_completions and completion.truncated))] * len(completion.ids)


def _reward_metrics(rewards: Sequence[RewardConfig], given: np.ndarray) -> dict[str, float]:
    metrics = {}
    for reward, values, counts in zip(rewards, given.T, counted(given, rewards).T, strict=True):
        scored = ~np.isnan(values)
        if scored.any():
            metrics[f"rewards/{reward.name}/mean"] = values[scored].mean().item()
            metrics[f"rewards/{reward.name}/std"] = sample_std(torch.from_numpy(values[scored])).item()
            if reward.clip or reward.gate:
                metrics[f"rewards/{reward.name}/counted"] = counts[scored].mean().item()
    return metrics


def _length_metrics(completions: Sequence[Completion]) -> dict[str, float]:
    lengths = torch.tensor([len(completion.ids) for completion in completions], dtype=torch.float32)
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
