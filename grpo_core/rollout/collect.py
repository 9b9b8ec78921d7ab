"""One generation batch, from prompts to rollout: sample, score, compare within groups; shared over all processes."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor

from grpo_core import rewards as reward_functions
from grpo_core.advantages import group_advantages
from grpo_core.config import RunConfig
from grpo_core.data import Prompts, decode_completions, derive_seed, rollout_prompts
from grpo_core.plan import Plan
from grpo_core.rollout.engine import Completion, Engine, Request, Rollout, Sampling, pad


class RolloutError(RuntimeError):
    """Samples that must not be trained on."""


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
    rewards: Sequence[reward_functions.Reward],
    engine: Engine,
    process: int,
) -> tuple[Rollout, list[Sample]]:
    """Generation batch `index`: the rollout, without old and reference log-probabilities, and its samples.

    Every process samples and scores its share; all get the whole.
    """
    start = time.perf_counter()
    share = plan.generation_batch_size // plan.num_processes
    rows = rollout_prompts(plan, config.seed, index)
    requests, local_rows = _requests(rows, prompts, plan, config.seed, index, process * share, (process + 1) * share)
    sampling = Sampling(
        max_tokens=config.rollout.max_completion_length,
        temperature=config.rollout.temperature,
        top_p=config.rollout.top_p,
        top_k=config.rollout.top_k,
    )
    completions = engine.generate(requests, sampling)
    generated = time.perf_counter()
    samples: list[Sample] = gather_object(score_completions(local_rows, completions, prompts, tokenizer, rewards))
    matrix = torch.tensor([sample.rewards for sample in samples], dtype=torch.float64)  # (B, K)
    weights = torch.tensor([reward.weight for reward in rewards], dtype=torch.float64)
    advantages = group_advantages(matrix, weights, plan.num_generations, config.train.scale_rewards)
    rollout = _rollout(index, samples, prompts, advantages.advantages, config.train.mask_truncated_completions)
    metrics = {
        "reward": advantages.rewards.nanmean().item(),
        "reward_std": advantages.group_std.mean().item(),
        "frac_reward_zero_std": (advantages.group_std == 0).float().mean().item(),
        **_reward_metrics(rewards, matrix),
        **_length_metrics(rollout),
        "time/generate": generated - start,
        "time/score": time.perf_counter() - generated,
    }
    return replace(rollout, metrics=metrics), samples


def score_completions(
    rows: Sequence[int],
    completions: Sequence[Completion],
    prompts: Prompts,
    tokenizer: Any,
    rewards: Sequence[reward_functions.Reward],
) -> list[Sample]:
    """Decode once, run every reward function; `rows` are the completions' dataset rows."""
    data = [prompts.rows[row] for row in rows]
    ids = [completion.ids for completion in completions]
    decoded = decode_completions(data, ids, tokenizer)
    columns = [reward_functions.score(reward, data, decoded, ids) for reward in rewards]
    return [
        Sample(row, completion, text if isinstance(text, str) else text[-1]["content"], list(values))
        for row, completion, text, *values in zip(rows, completions, decoded, *columns, strict=True)
    ]


def _requests(
    rows: Sequence[int], prompts: Prompts, plan: Plan, seed: int, index: int, first: int, last: int
) -> tuple[list[Request], list[int]]:
    """Requests for completions `first` to `last` of the generation batch, and the dataset row of each completion.

    A group may straddle two processes; its seeds go on where the other process's end.
    """
    requests: list[Request] = []
    local_rows: list[int] = []
    g = plan.num_generations
    for position in range(first // g, math.ceil(last / g)):
        begin, end = max(first, position * g), min(last, (position + 1) * g)
        row = rows[position]
        group_seed = derive_seed(seed, index, row)
        requests.append(Request(prompts.ids[row], end - begin, group_seed + begin - position * g))
        local_rows += [row] * (end - begin)
    return requests, local_rows


def _rollout(
    index: int, samples: Sequence[Sample], prompts: Prompts, advantages: Tensor, mask_truncated: bool
) -> Rollout:
    completions = [sample.completion for sample in samples]
    sampling_logprobs = pad([completion.logprobs for completion in completions], torch.float32)
    if not sampling_logprobs.isfinite().all():
        raise RolloutError(
            f"rollout {index}: the policy's log-probabilities are not finite: its weights are broken. An update before "
            "this one was too large (lower learning_rate or max_grad_norm), or the base model is damaged"
        )
    lengths = torch.tensor([len(completion.ids) for completion in completions])
    truncated = torch.tensor([completion.truncated for completion in completions])
    mask = (torch.arange(int(lengths.max())) < lengths[:, None]).float()
    if mask_truncated:
        mask = mask * ~truncated[:, None]
    return Rollout(
        index=index,
        prompt_ids=[prompts.ids[sample.row] for sample in samples],
        completion_ids=pad([completion.ids for completion in completions], torch.int64),
        completion_mask=mask,
        completion_lengths=lengths,
        truncated=truncated,
        sampling_logprobs=sampling_logprobs,
        advantages=advantages,
        metrics={},
    )


def _reward_metrics(rewards: Sequence[reward_functions.Reward], matrix: Tensor) -> dict[str, float]:
    metrics = {}
    for reward, values in zip(rewards, matrix.T, strict=True):
        scored = values[~values.isnan()]
        if len(scored):
            metrics[f"rewards/{reward.name}/mean"] = scored.mean().item()
            metrics[f"rewards/{reward.name}/std"] = scored.std(correction=0).item()
    return metrics


def _length_metrics(rollout: Rollout) -> dict[str, float]:
    lengths = rollout.completion_lengths.float()
    terminated = lengths[~rollout.truncated]
    return {
        "completions/mean_length": lengths.mean().item(),
        "completions/min_length": lengths.min().item(),
        "completions/max_length": lengths.max().item(),
        "completions/clipped_ratio": rollout.truncated.float().mean().item(),
        "completions/mean_terminated_length": terminated.mean().item() if len(terminated) else 0.0,
    }
