"""The policy that a training starts from, with an engine that has its weights, in one or several processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from grpo_core.config.run import RunConfig
from grpo_core.data.prompts import Prompts, load_prompts, load_tokenizer
from grpo_core.distributed import start_processes
from grpo_core.environments.setting import make_setting
from grpo_core.model.capabilities import check_padding
from grpo_core.model.loading import load_starting_policy
from grpo_core.model.parallelize import sharding
from grpo_core.model.positions import check_context
from grpo_core.model.precision import in_float32, with_precision_of
from grpo_core.model.sharded import is_sharded
from grpo_core.rewards.contract import rewards_of
from grpo_core.rewards.trl_arguments import UNKNOWN_PLAN, TrainerState
from grpo_core.rollout.collect import Sample, Scoring, sample_and_score
from grpo_core.rollout.factory import make_engine
from grpo_core.rollout.fallbacks import fallbacks
from grpo_core.rollout.types import Engine, Request, Sampling
from grpo_core.rollout.waiting import longest_wait, phase_limits
from grpo_core.system.progress import expect


@dataclass(frozen=True)
class Base:
    """All that is needed to sample from the base, and from other policies whose weights the engine is given. `shard`:
    how policies are divided among the processes; None: each process holds the whole."""

    config: RunConfig  # with the precision of the device
    processes: Any  # accelerate's Accelerator
    dtype: torch.dtype
    shard: Any
    scoring: Scoring
    sets: dict[str, Prompts]
    model: Any
    engine: Engine

    def sample(
        self, name: str, requests: Sequence[Request], rows: Sequence[int], sampling: Sampling
    ) -> tuple[list[Sample], float]:
        """Sample and score prompts of a set in this process; see `sample_and_score`."""
        return sample_and_score(self.engine, requests, rows, sampling, self.sets[name], self.scoring)


def load_base(
    config: RunConfig, files: Mapping[str, Path], completion: int, state: TrainerState = UNKNOWN_PLAN
) -> Base:
    """Start the processes and load all that is needed to sample completions of up to `completion` tokens of the prompts
    in `files`, by set. `state`: what rewards are told of the training."""
    expect(config.train.hang_timeout, phase_limits(config))
    # vLLM, which samples in the evaluation after a training on a recording, has operations that could not be repeated.
    repeated = config.train.deterministic and config.rollout.engine == "transformers"
    processes = start_processes(longest_wait(config), deterministic=repeated)
    config = with_precision_of(config, processes.device).model_copy(update={"rollout": config.rollout.in_evaluation})
    shard = sharding(config.train, frozen=True) if processes.num_processes > 1 else None
    tokenizer = load_tokenizer(config.model)
    setting = make_setting(config, tokenizer)
    encode, options = setting.encode if setting else None, config.data.chat_template_kwargs
    sets = {name: load_prompts(path, tokenizer, options, encode) for name, path in files.items()}
    scoring = Scoring(tokenizer, rewards_of(config), setting, state)
    dtype = torch.bfloat16 if config.train.mixed_precision == "bf16" else torch.float32
    model = load_starting_policy(config.model, dtype=dtype, device=processes.device, shard=shard)
    max_length = max(prompts.max_length for prompts in sets.values()) + completion
    check_context(model.config, max_length)
    with nullcontext() if is_sharded(model) else in_float32(model):
        check_padding(model, max_length)
    engine = make_engine(config, config.model.name_or_path, model, tokenizer, max_length)
    if processes.is_main_process:
        for note in fallbacks(engine):
            print(note, flush=True)
    if config.model.adapter:  # which the engine has not loaded
        engine.sync_weights(model)
    return Base(config, processes, dtype, shard, scoring, sets, model, engine)
