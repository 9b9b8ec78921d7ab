"""The GRPO loop: sample prompts, roll out, score, advantages, update, sync, log, save.

Group-relative policy optimisation (DeepSeekMath, arXiv:2402.03300) with the variations of `losses` and `advantages`.
The plan fixes how many updates there are and what each reads; a run's place in it is the number of updates done.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from grpo_core.algorithm.losses import top_entropy_mask
from grpo_core.data.order import training_order
from grpo_core.errors import RewardError, TrainingError
from grpo_core.model.loading import save_model, without_adapter
from grpo_core.rollout.collect import NotFiniteError, Sample, begin, collect
from grpo_core.rollout.types import Rollout
from grpo_core.rollout.vllm.server import VLLMServerEngine
from grpo_core.system.files import sync_to_disk
from grpo_core.training import health
from grpo_core.training.batch import MicroBatch, concatenate, micro_batch, with_gradient
from grpo_core.training.checkpoint import Checkpoints, require_shared
from grpo_core.training.health import Finding
from grpo_core.training.held_out import evaluate_policy, keep_best, load_best
from grpo_core.training.interrupt import Stopped, check, interruptible, listening
from grpo_core.training.log import Records
from grpo_core.training.session import Session, fingerprint, set_up
from grpo_core.training.state import Progress
from grpo_core.training.update import adapt_entropy, score, update
from grpo_core.training.weight_sync import probe_scores, sync


def train(run: Path, output: Path) -> dict[str, Any]:
    """Train RUN's model as configured and planned; returns (and writes) result.json's content.

    Reads config.toml, plan.json and dataset/ under `run`; writes checkpoints/, metrics.jsonl, health.jsonl,
    completions/, model/ (with LoRA adapter/ too) and result.json under `output`, continuing from the newest whole
    checkpoint there. Stopped on SIGTERM or SIGINT, RewardError when a reward fails, both with a checkpoint of the last
    update.
    """
    session = set_up(run)
    config, plan = session.config, session.plan
    checkpoints = Checkpoints(
        output / "checkpoints",
        fingerprint(run, config, plan),
        session.accelerator,
        session.model,
        session.optimizer,
        session.reference if config.algorithm.sync_ref_model else None,
    )
    progress = _begin(session, checkpoints)
    records = Records(session, output, progress)

    with listening():
        try:
            while progress.unevaluated or (progress.updates < plan.max_steps and not progress.stopped_early):
                step = progress.recorded + 1
                try:
                    if progress.unevaluated:  # stopped in its evaluation
                        metrics = progress.unevaluated
                    else:
                        progress, metrics = advance(session, progress, records)
                    if config.train.eval_steps and (step % config.train.eval_steps == 0 or step == plan.max_steps):
                        progress = replace(progress, unevaluated=metrics)
                        progress, evaluated = evaluate(session, progress)
                        metrics = {**metrics, **evaluated}
                        keep_best(session, progress, output / "best", checkpoints)
                    if broken := [name for name, value in metrics.items() if not math.isfinite(value)]:
                        raise NotFiniteError(f"step {step}: {', '.join(broken)} not finite")
                    streaks, findings = health.observe(config.health, progress.streaks, step, metrics)
                    progress = replace(progress, streaks=streaks)
                except NotFiniteError as error:
                    findings = [health.not_finite(config.health, step, error)]
                if _must_roll_back(session, records, findings, progress):
                    progress = roll_back(checkpoints, progress, config.train.save_total_limit)
                    if isinstance(session.engine, VLLMServerEngine):
                        session.engine.drop_begun()  # other samples are drawn from here on
                    records.rewind(progress)
                    continue
                records.step(step, metrics)
                if health.is_healthy(config.health, progress.streaks):
                    checkpoints.confirm(step - 1)  # this step's figures are of the weights that it began with
                if step % config.train.save_steps == 0 and step < plan.max_steps:
                    checkpoints.save(progress, config.train.save_total_limit)
        except (Stopped, RewardError) as stop:
            if progress.updates:
                checkpoints.save(progress, config.train.save_total_limit)
            records.stop(progress, "told to stop" if isinstance(stop, Stopped) else "a reward fails")
            raise
        return _finish(session, progress, records, output)


def advance(session: Session, progress: Progress, records: Records) -> tuple[Progress, dict[str, float]]:
    """The next update of the plan, with the generation batches that it needs; its metrics."""
    config, plan = session.config, session.plan
    start = time.perf_counter()
    parts: list[tuple[Rollout, int]] = []
    with interruptible(session.accelerator):
        for micro_step in plan.micro_steps(progress.updates):
            rollout = progress.rollout
            if rollout is None or rollout.index != micro_step.rollout:
                rollout, samples = roll_out(session, micro_step.rollout, progress)
                records.completions(progress.updates + 1, rollout, samples)
                progress = progress.with_rollout(rollout, plan)
                check(session.accelerator)
            parts.append((rollout, micro_step.slice))
        batch = concatenate([_micro_batch(session, *part, len(parts)) for part in parts])
        metrics = update(session, batch, progress)
    progress = replace(progress, rows_per_pass=session.memory.rows)
    kept_entropy = metrics.pop("kept_entropy", None)
    if config.algorithm.use_adaptive_entropy and kept_entropy is not None:
        progress = adapt_entropy(config.algorithm, progress, kept_entropy)
    seconds = time.perf_counter() - start
    progress = progress.with_update(seconds)
    if config.algorithm.sync_ref_model and progress.updates % config.algorithm.ref_model_sync_steps == 0:
        move_reference(session)
    metrics |= _mean_metrics([rollout for rollout, _ in parts])
    metrics |= {"epoch": plan.epoch(progress.updates), "num_tokens": progress.num_tokens, "step_time": seconds}
    return progress, metrics


def roll_out(session: Session, index: int, progress: Progress) -> tuple[Rollout, list[Sample]]:
    """Generation batch `index` from the policy as it stands, with the log-probabilities that its updates compare to."""
    s, algorithm = session, session.config.algorithm
    drift = sync(s, progress)
    if s.config.rollout.max_staleness:
        sample_ahead(s, index, progress)
    rollout, samples = collect(
        index, s.config, s.plan, s.prompts, s.tokenizer, s.rewards, s.engine, s.accelerator, progress.roll_backs
    )
    in_loss = rollout.completion_mask.sum(1) > 0
    if algorithm.top_entropy_quantile < 1:
        old_logprobs, entropy = score(s, s.policy, rollout, in_loss)
        keep = top_entropy_mask(entropy, rollout.completion_mask, algorithm.top_entropy_quantile)
        rollout = replace(rollout, keep=keep, old_logprobs=None if s.plan.on_policy else old_logprobs)
    elif not s.plan.on_policy:
        every = algorithm.beta > 0 or algorithm.has_entropy_bonus  # which train completions without an advantage too
        read = in_loss if every else with_gradient(rollout.advantages, rollout.completion_mask)
        rollout = replace(rollout, old_logprobs=score(s, s.policy, rollout, read)[0])
    if s.reference is not None:
        rollout = replace(rollout, ref_logprobs=score(s, s.reference, rollout, in_loss)[0])
    elif algorithm.beta > 0:
        with without_adapter(s.policy.model):
            rollout = replace(rollout, ref_logprobs=score(s, s.policy, rollout, in_loss)[0])
    return replace(rollout, metrics={**rollout.metrics, "sampling/sync_drift": drift}), samples


def sample_ahead(session: Session, index: int, progress: Progress) -> None:
    """Begin generation batch `index`, unless that was done one batch ago, and the one after it."""
    s = session
    assert isinstance(s.engine, VLLMServerEngine)
    for number in range(index, min(index + 2, s.plan.rollouts)):
        begin(number, s.config, s.plan, s.prompts, s.engine, s.accelerator, progress.roll_backs)


@torch.no_grad()
def move_reference(session: Session) -> None:
    """reference ← alpha · policy + (1 − alpha) · reference (TR-DPO, arXiv:2404.09656)."""
    assert session.reference is not None
    alpha = session.config.algorithm.ref_model_mixup_alpha
    for old, new in zip(session.reference.master.parameters(), session.model.parameters(), strict=True):
        old.lerp_(new.to(old.device), alpha)
    session.reference.refresh()


def evaluate(session: Session, progress: Progress) -> tuple[Progress, dict[str, float]]:
    """The policy on the held-out prompts: metrics, and whether it is the best so far."""
    keys = session.config.train
    with interruptible(session.accelerator):
        metrics = evaluate_policy(session, progress)
    value = metrics.get(keys.metric_for_best_model, -torch.inf)
    return progress.with_evaluation(value, keys.early_stopping_threshold, keys.early_stopping_patience), metrics


def roll_back(checkpoints: Checkpoints, progress: Progress, keep: int) -> Progress:
    """Back to the last healthy checkpoint; from there with other samples and half the learning rate.

    A generation batch of which updates are left is sampled again for them. The checkpoint is written again with the
    number of roll-backs, so that a run killed later does not forget it.
    """
    restored = checkpoints.restore(healthy=True)
    if restored is None:
        raise TrainingError(
            f"no healthy, undamaged checkpoint is left under {checkpoints.directory} to roll back to; start the "
            "training from the beginning, or set the health action to 'warn' or 'stop'"
        )
    restored = replace(restored, rollout=None, roll_backs=progress.roll_backs + 1, streaks={})
    checkpoints.save(restored, keep, healthy=True)
    return restored


def _begin(session: Session, checkpoints: Checkpoints) -> Progress:
    """Where to go on: the newest checkpoint, or the start."""
    config = session.config
    require_shared(checkpoints.directory.parent, session.accelerator)
    session.probe.compare(probe_scores(session))  # both have the base's weights, also if a checkpoint changes them next
    progress = checkpoints.restore()
    if progress is None:
        progress = Progress(rows_per_pass=session.memory.rows, entropy_coef=config.algorithm.entropy_coef)
        if health.may_roll_back(config.health):
            # Nothing is older to go back to, whatever the first step finds.
            checkpoints.save(progress, config.train.save_total_limit, healthy=True)
    session.memory.rows = progress.rows_per_pass
    return progress


def _must_roll_back(session: Session, records: Records, findings: Sequence[Finding], progress: Progress) -> bool:
    """Say what was found; TrainingError when it is a reason to stop, or when rolling back has been tried enough."""
    for finding in findings:
        records.finding(finding)
    stops = [finding for finding in findings if finding.action == "stop"]
    if stops:
        raise TrainingError(stops[0].message)
    roll_backs = [finding for finding in findings if finding.action == "roll_back"]
    if roll_backs and progress.roll_backs >= session.config.health.max_roll_backs:
        raise TrainingError(
            f"{roll_backs[0].message}. This is unhealthy again after {progress.roll_backs} roll-backs "
            "(health.max_roll_backs), so training stops"
        )
    return bool(roll_backs)


def _finish(session: Session, progress: Progress, records: Records, output: Path) -> dict[str, Any]:
    """Hand on the model and the result, once what happened is what was planned."""
    expected = session.plan.counts(progress.updates)
    if progress.counts != expected:
        raise TrainingError(f"after {progress.updates} updates the plan says {expected}, counted is {progress.counts}")
    if session.config.train.load_best_model_at_end and progress.best_step is not None:
        load_best(session, progress.best_step, output / "best")
    if session.accelerator.is_main_process:
        save_model(session.model, session.tokenizer, output / "model")
        sync_to_disk(output)  # before result.json says that all is there
    result = records.finish(progress)
    # While this thread waits, gloo's can let go of the last tensors, for which it needs the GIL; destroying the process
    # group joins it with the GIL held.
    session.accelerator.wait_for_everyone()
    session.engine.close()
    session.accelerator.end_training()
    return result


def _micro_batch(session: Session, rollout: Rollout, part: int, micro_steps: int) -> MicroBatch:
    """This process's rows of one slice of a rollout, weighted as one of `micro_steps` in the update."""
    config, plan = session.config, session.plan
    rows = training_order(plan, config.seed, rollout.index)[part, session.accelerator.process_index].tolist()
    return micro_batch(rollout, rows, plan, config, micro_steps)


def _mean_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Mean of the rollouts' metrics, each weighted by its share of the update."""
    names = {name: None for rollout in rollouts for name in rollout.metrics}
    values = {name: [rollout.metrics[name] for rollout in rollouts if name in rollout.metrics] for name in names}
    return {name: sum(found) / len(found) for name, found in values.items()}
