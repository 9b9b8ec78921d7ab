"""Answers of policies to the prompts of an evaluation, from one engine, in one or several processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from grpo_core.config.run import RunConfig
from grpo_core.data.prompts import Prompts
from grpo_core.distributed import own_range
from grpo_core.evaluation.samples import Columns, answer_columns
from grpo_core.model.divergence import mean_kl
from grpo_core.model.images import images_of
from grpo_core.model.loading import load_model, load_starting_policy
from grpo_core.model.sharded import sharding
from grpo_core.rewards.contract import rewards_of
from grpo_core.rewards.trl_arguments import UNKNOWN_PLAN, TrainerState
from grpo_core.rollout.collect import Sample, Scoring, sample_and_score, share_samples
from grpo_core.rollout.loading import check_lengths, fallbacks, make_engine, read_prompts, start_configured
from grpo_core.rollout.requests import evaluation_request, evaluation_sampling
from grpo_core.rollout.types import Engine


@dataclass(frozen=True)
class SamplingSession:
    """Samples from the policy that a training starts from, and from others whose weights the engine is given.
    `shard`: how policies are divided among the processes; None: each process holds the whole."""

    config: RunConfig  # with the precision of the device
    processes: Accelerator
    dtype: torch.dtype
    shard: Any
    scoring: Scoring
    sets: dict[str, Prompts]
    base: Any
    engine: Engine


def load_sampling(
    config: RunConfig, files: Mapping[str, Path], completion: int, state: TrainerState = UNKNOWN_PLAN
) -> SamplingSession:
    """Start the processes and load all that is needed to sample completions of up to `completion` tokens of the prompts
    in `files`, by set. `state`: what rewards are told of the training."""
    # vLLM, which samples in the evaluation after a training on a recording, has operations that could not be repeated.
    repeated = config.train.deterministic and config.rollout.engine == "transformers"
    config, processes = start_configured(config, deterministic=repeated)
    config = config.model_copy(update={"rollout": config.rollout.in_evaluation})
    shard = sharding(config.train, frozen=True) if processes.num_processes > 1 else None
    prompts = read_prompts(config, files)
    scoring = Scoring(prompts.tokenizer, rewards_of(config), prompts.setting, state)
    dtype = torch.bfloat16 if config.train.mixed_precision == "bf16" else torch.float32
    base = load_starting_policy(config.model, dtype=dtype, device=processes.device, shard=shard, images=prompts.images)
    max_length = max(of_set.max_length for of_set in prompts.sets.values()) + completion
    check_lengths(base, max_length)
    engine = make_engine(config, config.model.name_or_path, base, prompts.tokenizer, max_length)
    if processes.is_main_process:
        for note in fallbacks(engine):
            print(note, flush=True)
    if config.model.adapter:  # which the engine has not loaded
        engine.sync_weights(base)
    return SamplingSession(config, processes, dtype, shard, scoring, prompts.sets, base, engine)


def answers_of_base(session: SamplingSession, policy: str = "base") -> Columns:
    """Answers of the policy that the session was loaded with, as those of `policy`."""
    rewards = session.scoring.rewards
    return {name: answer_columns(policy, _samples(session, policy, name), rewards) for name in session.sets}


def answers_of_model(session: SamplingSession, policy: str, folder: Path) -> Columns:
    """Answers of the policy in a folder, and its KL to the base. Its weights go when this returns: one policy beside
    the base is enough."""
    model = load_model(
        folder,
        dtype=session.dtype,
        device=session.processes.device,
        shard=session.shard,
        images=images_of(session.base),
    )
    session.engine.sync_weights(model)
    columns: Columns = {}
    for name in session.sets:
        samples = _samples(session, policy, name)
        prompts, completions = [it.prompt_ids for it in samples], [it.completion.ids for it in samples]
        kl = mean_kl(model, session.base, prompts, completions, [it.completion.mask for it in samples])
        columns[name] = answer_columns(policy, samples, session.scoring.rewards) | {f"{policy}/kl": kl}
    return columns


def _samples(session: SamplingSession, policy: str, name: str) -> list[Sample]:
    """Samples of a set's prompts, over all processes, from the policy whose weights the engine has."""
    config, prompts = session.config, session.sets[name]
    if session.processes.is_main_process:
        print(f"evaluating the {policy} policy on {len(prompts.ids)} prompts ({name})", flush=True)
    n = config.evaluation.num_samples
    requests = [evaluation_request(config, prompts, row, n) for row in own_range(len(prompts.ids))]
    sampling, scoring = evaluation_sampling(config), session.scoring
    return share_samples(lambda: sample_and_score(session.engine, requests, sampling, prompts, scoring))[0]
