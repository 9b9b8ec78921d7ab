"""The GRPO loop: sample prompts, roll out, score, advantages, update, sync, log, save.

Group-relative policy optimisation (DeepSeekMath, arXiv:2402.03300) with the variations of `losses` and `advantages`.
The plan fixes how many updates there are and what each reads; a run's place in it is the number of updates done.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections import defaultdict
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor
from transformers import get_scheduler

from grpo_core import checkpoint
from grpo_core.batching import MicroBatch, join, micro_batch
from grpo_core.config import RunConfig, TrainConfig, load_config
from grpo_core.data import Prompts, load_prompts, training_order
from grpo_core.losses import token_losses
from grpo_core.plan import Plan, load_plan
from grpo_core.policy import Policy, load_model, load_tokenizer
from grpo_core.records import Records
from grpo_core.rewards import Reward, resolve
from grpo_core.rollout.collect import Sample, collect
from grpo_core.rollout.engine import Engine, Rollout, make_engine


class TrainingError(RuntimeError):
    """Training that must not go on; the message gives the step, the figure and what to try."""


@dataclass(frozen=True)
class Session:
    """What stays the same from the first update to the last; the policy's weights and the optimizer's state move."""

    config: RunConfig
    plan: Plan
    accelerator: Accelerator
    tokenizer: Any
    prompts: Prompts
    rewards: list[Reward]
    model: Any  # the policy's causal LM, not wrapped
    policy: torch.nn.Module
    reference: Policy | None
    optimizer: Any
    scheduler: Any
    engine: Engine


def train(run: Path, output: Path, report_to: str | None = None) -> dict[str, Any]:
    """Train RUN's model as configured and planned; returns (and writes) result.json's content.

    Reads config.toml, plan.json and dataset/train.parquet under `run`; writes checkpoints/, metrics.jsonl,
    completions/, model/ and result.json under `output`, continuing from the newest checkpoint there. `report_to`: an
    Accelerate tracker's name ("mlflow") that gets the metrics live.
    """
    session = set_up(run, report_to)
    config, plan, accelerator = session.config, session.plan, session.accelerator
    fingerprint = _fingerprint(config, plan)
    progress = checkpoint.restore(accelerator, output / "checkpoints", fingerprint)
    records = Records(accelerator, output, plan, resumed_at=progress.updates, project=config.registry.experiment)

    for step in range(progress.updates, plan.max_steps):
        start = time.perf_counter()
        slices = []
        rollout = progress.rollout
        for micro_step in plan.micro_steps(step):
            if rollout is None or rollout.index != micro_step.rollout:
                rollout, samples = roll_out(session, micro_step.rollout)
                records.completions(rollout, samples, session.prompts, [reward.name for reward in session.rewards])
                progress = progress.with_rollout(rollout)
            slices.append((rollout, micro_step.slice))
        metrics = update(session, [_micro_batch(session, *s, len(slices)) for s in slices], step + 1)
        seconds = time.perf_counter() - start
        progress = progress.with_update(seconds)
        metrics |= _mean_metrics([rollout for rollout, _ in slices])
        metrics |= {"epoch": plan.epoch(step + 1), "num_tokens": progress.completion_tokens, "step_time": seconds}
        records.step(step + 1, metrics)
        if progress.updates % config.train.save_steps == 0 and progress.updates < plan.max_steps:
            keep = config.train.save_total_limit
            checkpoint.save(accelerator, output / "checkpoints", progress, fingerprint, keep)

    if accelerator.is_main_process:
        session.model.save_pretrained(output / "model")
        session.tokenizer.save_pretrained(output / "model")
    result = records.finish(progress)
    # While this thread waits, gloo's can let go of the last tensors, for which it needs the GIL; destroying the process
    # group joins it with the GIL held.
    accelerator.wait_for_everyone()
    session.engine.close()
    accelerator.end_training()
    return result


def set_up(run: Path, report_to: str | None) -> Session:
    """Load and prepare everything that the run directory's configuration names."""
    config, plan = load_config(run / "config.toml"), load_plan(run / "plan.json")
    accelerator = Accelerator(mixed_precision=config.train.mixed_precision, log_with=report_to)
    if accelerator.num_processes != plan.num_processes:
        raise TrainingError(
            f"the plan is for num_processes={plan.num_processes}, but {accelerator.num_processes} were started; "
            f"use `accelerate launch --num_processes {plan.num_processes}`, or change train.num_processes and plan anew"
        )
    rewards = [resolve(reward) for reward in config.rewards]
    tokenizer = load_tokenizer(config.model)
    prompts = load_prompts(run / "dataset" / "train.parquet", tokenizer)
    model = load_model(config.model.name_or_path, config.model.revision).to(accelerator.device)
    raw_optimizer = _optimizer(model, config.train)
    scheduler = get_scheduler(config.train.lr_scheduler_type, raw_optimizer, plan.warmup_steps, plan.max_steps)
    max_length = prompts.max_length + config.rollout.max_completion_length
    engine = make_engine(config, config.model.name_or_path, model, tokenizer, max_length)
    set_seed(config.seed)  # after the engine, which seeds the process for itself
    policy, optimizer = accelerator.prepare(Policy(model, config.rollout.temperature), raw_optimizer)
    accelerator.register_for_checkpointing(scheduler)
    return Session(
        config=config,
        plan=plan,
        accelerator=accelerator,
        tokenizer=tokenizer,
        prompts=prompts,
        rewards=rewards,
        model=model,
        policy=policy,
        reference=_reference(config, accelerator),
        optimizer=optimizer,
        scheduler=scheduler,
        engine=engine,
    )


def roll_out(session: Session, index: int) -> tuple[Rollout, list[Sample]]:
    """Generation batch `index` from the policy as it stands, with the log-probabilities that its updates compare to."""
    s = session
    s.engine.sync_weights(s.model)
    rollout, samples = collect(
        index, s.config, s.plan, s.prompts, s.tokenizer, s.rewards, s.engine, s.accelerator.process_index
    )
    if not s.plan.on_policy:
        rollout = replace(rollout, old_logprobs=_score(s.policy, rollout, s.plan, s.accelerator))
    if s.reference is not None:
        rollout = replace(rollout, ref_logprobs=_score(s.reference, rollout, s.plan, s.accelerator))
    return rollout, samples


def update(session: Session, micro_batches: list[MicroBatch], step: int) -> dict[str, float]:
    """One optimizer update from the process's micro-batches; metrics over all processes."""
    config, accelerator = session.config.train, session.accelerator
    policy, optimizer, scheduler = session.policy, session.optimizer, session.scheduler
    learning_rate = scheduler.get_last_lr()[0]
    sums: dict[str, Tensor] = defaultdict(lambda: torch.zeros((), device=accelerator.device))
    largest_difference = torch.zeros((), device=accelerator.device)
    for position, batch in enumerate(micro_batches):
        is_last = position == len(micro_batches) - 1
        with nullcontext() if is_last else accelerator.no_sync(policy):
            logprobs, entropy = policy(batch.sequences)
            old_logprobs = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
            losses = token_losses(
                logprobs,
                old_logprobs,
                batch.mask,
                batch.advantages,
                epsilon=config.epsilon,
                epsilon_high=config.epsilon if config.epsilon_high is None else config.epsilon_high,
                importance_sampling_level=config.importance_sampling_level,
                ref_logprobs=batch.ref_logprobs,
                beta=config.beta,
                use_bias_correction_kl=config.use_bias_correction_kl,
            )
            loss = (batch.weights * losses.loss).sum()
            accelerator.backward(loss)
        difference = (old_logprobs - batch.sampling_logprobs).abs()
        largest_difference = torch.maximum(largest_difference, (difference * batch.mask).max())
        per_token = {
            "entropy": entropy,
            "sampling/sampling_logp_difference/mean": difference,
            "clip_ratio/low_mean": losses.clipped_low,
            "clip_ratio/high_mean": losses.clipped_high,
            "clip_ratio/region_mean": losses.clipped_low | losses.clipped_high,
        }
        if losses.kl is not None:
            per_token["kl"] = losses.kl
        for name, values in per_token.items():
            sums[name] += (values * batch.mask).sum()
        sums["loss"] += loss.detach()
        sums["tokens"] += batch.mask.sum()
    grad_norm = float(accelerator.clip_grad_norm_(policy.parameters(), config.max_grad_norm))
    totals = dict(zip(sums, accelerator.reduce(torch.stack(list(sums.values())), "sum").tolist(), strict=True))
    loss_value = totals.pop("loss") / accelerator.num_processes
    tokens = max(totals.pop("tokens"), 1.0)
    if not (math.isfinite(loss_value) and math.isfinite(grad_norm)):
        raise TrainingError(
            f"step {step}: loss {loss_value}, gradient norm {grad_norm}: the update would destroy the model. "
            "Lower learning_rate or max_grad_norm, or look at this step's completions; the last checkpoint is intact"
        )
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    return {
        "loss": loss_value,
        "grad_norm": grad_norm,
        "learning_rate": learning_rate,
        **{name: total / tokens for name, total in totals.items()},
        "sampling/sampling_logp_difference/max": float(accelerator.gather(largest_difference).max()),
    }


@torch.no_grad()
def _score(policy: torch.nn.Module, rollout: Rollout, plan: Plan, accelerator: Accelerator) -> Tensor:
    """Log-probabilities of the whole rollout, each process computing its share. (B, T) on the CPU"""
    share = plan.generation_batch_size // plan.num_processes
    first = accelerator.process_index * share
    scored = torch.zeros(share, rollout.completion_ids.shape[1], device=accelerator.device)
    for start in range(0, share, plan.per_device_train_batch_size):
        rows = list(range(first + start, first + start + plan.per_device_train_batch_size))
        with accelerator.autocast():
            logprobs, _ = policy(join(rollout, rows).to(accelerator.device))
        scored[start : start + len(rows), : logprobs.shape[1]] = logprobs
    return accelerator.gather(scored).cpu()


def _micro_batch(session: Session, rollout: Rollout, part: int, micro_steps: int) -> MicroBatch:
    """This process's rows of one slice of a rollout, weighted as one of `micro_steps` in the update."""
    config, plan, accelerator = session.config, session.plan, session.accelerator
    rows = training_order(plan, config.seed, rollout.index)[part, accelerator.process_index].tolist()
    limit = config.rollout.max_completion_length
    return micro_batch(rollout, rows, plan, config.train.loss_type, limit, micro_steps, accelerator.device)


def _mean_metrics(rollouts: list[Rollout]) -> dict[str, float]:
    """Mean of the rollouts' metrics, each weighted by its share of the update."""
    names = {name: None for rollout in rollouts for name in rollout.metrics}
    values = {name: [rollout.metrics[name] for rollout in rollouts if name in rollout.metrics] for name in names}
    return {name: sum(found) / len(found) for name, found in values.items()}


def _reference(config: RunConfig, accelerator: Accelerator) -> Policy | None:
    """The base model, frozen, when the KL term needs it."""
    if config.train.beta == 0:
        return None
    model = load_model(config.model.name_or_path, config.model.revision).to(accelerator.device)
    return Policy(model.requires_grad_(False), config.rollout.temperature)


def _optimizer(model: torch.nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]  # biases and norms: no weight decay
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    betas = (config.adam_beta1, config.adam_beta2)
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=betas, eps=config.adam_epsilon)


def _fingerprint(config: RunConfig, plan: Plan) -> str:
    """What a checkpoint belongs to: the parts of the configuration that training reads, and the plan."""
    values = config.model_dump(mode="json", include={"seed", "model", "rewards", "rollout", "train"})
    return hashlib.blake2b(json.dumps([values, vars(plan)], sort_keys=True).encode()).hexdigest()
