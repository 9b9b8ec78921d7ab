"""Everything that a training uses from its first update to its last, loaded from a run directory."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from transformers import get_scheduler
from transformers.trainer_pt_utils import get_parameter_names

from grpo_core.config.files import load_config
from grpo_core.config.run import RunConfig
from grpo_core.config.training import TrainConfig
from grpo_core.data.prompts import Prompts, load_prompts, load_tokenizer
from grpo_core.distributed import any_process
from grpo_core.errors import TrainingError
from grpo_core.fingerprint import determining
from grpo_core.model.capabilities import check_padding
from grpo_core.model.loading import load_model, with_adapter
from grpo_core.model.policy import Policy
from grpo_core.model.positions import check_context
from grpo_core.planning.plan import Plan, load_plan
from grpo_core.rewards.contract import Reward, resolve, source_of
from grpo_core.rollout.factory import make_engine
from grpo_core.rollout.types import Engine, Lookahead
from grpo_core.training.memory import OutOfMemoryRetry
from grpo_core.training.probe import SHORTEST, Probe, probe_sequences

# In parameter names, as Trainer.get_decay_parameter_names of transformers has them.
BIASES_AND_NORMS = ["bias", "layernorm", "rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]


@dataclass(frozen=True)
class Session:
    """Configuration, data and the objects that hold weights; what changes from update to update is `TrainingState`."""

    config: RunConfig
    plan: Plan
    accelerator: Accelerator
    tokenizer: Any
    prompts: Prompts
    held_out: Prompts | None  # for evaluation in training
    rewards: list[Reward]
    model: Any  # the causal LM with the weights that are trained, under its adapter if there is one
    policy: Policy
    reference: Policy | None  # a model of its own; None without KL, and with an adapter, whose base it is
    optimizer: torch.optim.Optimizer
    learning_rate: Callable[[int], float]  # by the number of updates done
    engine: Engine
    lookahead: Lookahead | None  # the engine, if it samples ahead of the training
    memory: OutOfMemoryRetry
    probe: Probe


def load_session(run: Path) -> Session:
    """Load and prepare everything that the run directory's configuration names."""
    config, plan = load_config(run / "config.toml"), load_plan(run / "plan.json")
    accelerator = Accelerator()
    if accelerator.num_processes != plan.num_processes:
        raise TrainingError(
            f"the plan is for num_processes={plan.num_processes}, but {accelerator.num_processes} were started; "
            f"use `accelerate launch --num_processes {plan.num_processes}`, or change train.num_processes and plan anew"
        )
    rewards = [resolve(reward) for reward in config.rewards]
    tokenizer = load_tokenizer(config.model)
    prompts = load_prompts(run / "dataset" / "train.parquet", tokenizer)
    held_out = load_prompts(run / "dataset" / "eval.parquet", tokenizer) if config.train.eval_steps else None
    set_seed(config.seed)
    # vLLM scores nothing as long as its longest sequence: it wants room for one more token.
    longest = prompts.max_length + config.rollout.max_completion_length  # of the sequences that are trained
    lengths = [SHORTEST + 1, longest]
    if held_out is not None:
        lengths.append(held_out.max_length + config.evaluation_length)
    max_length = max(lengths)
    base = load_model(config.model.name_or_path, config.model.revision).to(accelerator.device)
    check_context(base.config, max_length)
    check_padding(base, max_length)
    model = with_adapter(base, config.model)
    policy = Policy(
        model,
        config.rollout.temperature,
        max_length=max_length,
        bf16=config.train.mixed_precision == "bf16",
        gradient_checkpointing=config.train.gradient_checkpointing,
        torch_compile=config.train.torch_compile,
    )
    policy.packs = not any_process(not policy.packs)  # they divide rows by what a pass costs, and must agree
    engine = make_engine(config, config.model.name_or_path, policy.model, tokenizer, max_length)
    set_seed(config.seed)  # after the engine, which seeds the process for itself
    optimizer = _optimizer(model, config.train)
    if not policy.packs and accelerator.is_main_process:
        why = policy.why_padded or "another process cannot pack them"
        print(f"prompts are computed again for each completion, and rows are padded: {why}")
    return Session(
        config=config,
        plan=plan,
        accelerator=accelerator,
        tokenizer=tokenizer,
        prompts=prompts,
        held_out=held_out,
        rewards=rewards,
        model=model,
        policy=policy,
        reference=_reference(config, accelerator, max_length),
        optimizer=optimizer,
        learning_rate=_learning_rate(optimizer, config.train, plan),
        engine=engine,
        lookahead=engine if config.rollout.max_staleness and isinstance(engine, Lookahead) else None,
        memory=OutOfMemoryRetry(plan.per_device_train_batch_size * longest, policy),
        probe=Probe(
            probe_sequences(prompts.ids, tokenizer.eos_token_id, max(lengths) - 1), config.train.mixed_precision
        ),
    )


def fingerprint(run: Path, config: RunConfig, plan: Plan) -> str:
    """Hash of everything that a training depends on: plan, data, reward functions, configuration. A checkpoint is
    continued only under the same one."""
    sections = ["seed", "model", "rewards", "rollout", "algorithm", "train", "held_out"]
    values = [determining(config)[section] for section in sections]
    digest = hashlib.blake2b(json.dumps([values, vars(plan)], sort_keys=True).encode())
    for reward in config.rewards:
        digest.update(hashlib.blake2b(source_of(reward)).digest())
    for name in ("train", "eval") if config.train.eval_steps else ("train",):
        with (run / "dataset" / f"{name}.parquet").open("rb") as data:
            digest.update(hashlib.file_digest(data, "blake2b").digest())
    return digest.hexdigest()


def _reference(config: RunConfig, accelerator: Accelerator, max_length: int) -> Policy | None:
    """The base model, frozen, when the KL term needs a copy of it."""
    if config.algorithm.beta == 0 or config.model.use_peft:
        return None
    model = load_model(config.model.name_or_path, config.model.revision).to(accelerator.device)
    bf16 = config.train.mixed_precision == "bf16"
    return Policy(model.requires_grad_(False), config.rollout.temperature, max_length=max_length, bf16=bf16)


def _optimizer(model: torch.nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices, except those that transformers' Trainer takes for biases or norms, such as
    the biases of fused experts and the norms of single heads."""
    weights = {*get_parameter_names(model, [torch.nn.LayerNorm], BIASES_AND_NORMS)}
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    decayed = [p for name, p in trained.items() if name in weights and p.ndim >= 2]
    others = [p for name, p in trained.items() if not (name in weights and p.ndim >= 2)]
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    betas = (config.adam_beta1, config.adam_beta2)
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=betas, eps=config.adam_epsilon, fused=True)


def _learning_rate(optimizer: torch.optim.Optimizer, config: TrainConfig, plan: Plan) -> Callable[[int], float]:
    """transformers' schedule as a function of the number of updates done, so that there is no state to save."""
    scheduler = get_scheduler(config.lr_scheduler_type, optimizer, plan.warmup_steps, plan.max_steps)
    return lambda updates: config.learning_rate * scheduler.lr_lambdas[0](updates)
