"""Requests to an engine: for a generation batch, and for an evaluation."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_core.config.rollout import RolloutConfig
from grpo_core.config.run import RunConfig
from grpo_core.data.order import Group, derive_seed
from grpo_core.data.prompts import Prompts
from grpo_core.rollout.types import Request, Sampling, token_limit


def training_sampling(config: RolloutConfig) -> Sampling:
    """Sampling of training completions."""
    return Sampling(
        config.max_completion_length,
        config.temperature,
        config.top_p,
        config.top_k,
        config.min_p,
        config.repetition_penalty,
        tuple(config.stop),
    )


def evaluation_sampling(config: RunConfig) -> Sampling:
    """Sampling of evaluated completions."""
    keys = config.evaluation
    return Sampling(config.evaluation_length, keys.temperature, keys.top_p, keys.top_k, stop=tuple(config.rollout.stop))


def vllm_parameters(request: Request, sampling: Sampling) -> dict[str, Any]:
    """The request's sampling by vLLM's names, with the seed of its first completion."""
    return {
        "seed": request.seed,
        "max_tokens": token_limit(request, sampling),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "stop": [*sampling.stop],
        "detokenize": bool(sampling.stop),
        "logprobs": 0,
    }


def own_limit(config: RunConfig, row: Mapping[str, Any]) -> int | None:
    """Tokens after which completions of this dataset row are cut off; None if its source has no limit of its own."""
    limits = {source.name: source.max_completion_length for source in config.data.sources}
    return limits[row["source"]] if limits else None


def evaluation_request(config: RunConfig, prompts: Prompts, row: int, num_samples: int = 1) -> Request:
    """Return the request for completions of a held-out prompt; its seeds depend only on run seed and row."""
    limit = own_limit(config, prompts.rows[row])
    limit = limit and min(limit, config.evaluation_length)
    return Request(prompts.ids[row], num_samples, derive_seed(config.seed, row), limit, row=row)


def group_requests(
    config: RunConfig, prompts: Prompts, groups: Sequence[Group], mine: range, attempt: int
) -> list[Request]:
    """Return requests for the completions `mine` of the groups, each of one group. Another `attempt` draws others.

    A group may straddle two processes; its seeds continue where the other process's end. They do not depend on when
    the group is sampled.
    """
    g, requests = config.rollout.num_generations, list[Request]()
    for position, members in itertools.groupby(mine, lambda completion: completion // g):
        (turn, row), (first, *others) = groups[position], members
        seed = derive_seed(config.seed, turn, attempt, row) + first % g
        limit = own_limit(config, prompts.rows[row]) if config.data.sources else None  # a row takes long to read
        requests.append(Request(prompts.ids[row], 1 + len(others), seed, limit, row=row))
    return requests
