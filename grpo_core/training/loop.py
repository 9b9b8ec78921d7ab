"""The GRPO loop: roll out (sync weights, sample, score, advantages), update, evaluate, check health, log, save.

Group-relative policy optimisation (DeepSeekMath, arXiv:2402.03300) with the variations of `algorithm.losses` and
`algorithm.advantages`. The plan fixes how many updates there are and what each reads; a run's place in it is the number
of updates done.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from grpo_core import run_files
from grpo_core.data.demonstrations import METRICS
from grpo_core.distributed import wait_for_all
from grpo_core.errors import NotFiniteError, RewardError, RolloutError, TrainingError
from grpo_core.model.saving import save_model
from grpo_core.model.sharded import sharding
from grpo_core.planning.tokens_per_pass import write_limit
from grpo_core.rollout.types import Rollout
from grpo_core.system.files import sync_to_disk
from grpo_core.system.progress import LOOP, phase
from grpo_core.training import health
from grpo_core.training.batch import update_batch
from grpo_core.training.checkpoint import Checkpoints, fingerprint
from grpo_core.training.end_rehearsal import rehearse_end
from grpo_core.training.health import Finding
from grpo_core.training.held_out import evaluate_policy, keep_best, load_best
from grpo_core.training.interrupt import Stopped, interruptible, stop_if_asked, stop_signals
from grpo_core.training.log import TrainingLog
from grpo_core.training.out_of_memory import SharedModelError
from grpo_core.training.recovery import lower_staleness, must_roll_back, resume, roll_back
from grpo_core.training.roll_out import arrange_epochs, roll_out
from grpo_core.training.session import Session, load_session
from grpo_core.training.state import TrainingState
from grpo_core.training.update import adapt_entropy, move_average, move_reference, update


def train(run: Path, output: Path, *, warm_start: bool = False) -> dict[str, Any]:
    """Train RUN's model as configured and planned; returns (and writes) the content of result.json. `warm_start`: on
    demonstrations, as [warm_start] says, instead of by GRPO.

    Reads config.toml, plan.json and dataset/ under `run`; a warm start its own plan.json under `output`. Writes
    checkpoints/, metrics.jsonl, health.jsonl, completions/, model/ (with LoRA adapter/ too) and result.json under
    `output`, continuing from the newest undamaged checkpoint there. Raises Stopped on SIGTERM or SIGINT, RewardError if
    a reward fails and EngineError if the engine fails, each after saving a checkpoint of the last update.
    """
    session = load_session(run, output if warm_start else None)
    reference = session.reference if session.config.algorithm.sync_ref_model else None
    shown = session.demonstrations.rows.path if session.demonstrations else None
    identity = fingerprint(run, session.config, session.plan, demonstrations=shown)
    checkpoints = Checkpoints(
        output / run_files.CHECKPOINTS,
        identity,
        session.config,
        session.accelerator,
        session.model,
        session.optimizer,
        reference,
        session.average,
    )
    rehearse_end(session.config, session.model, session.scoring.tokenizer, session.plan, output)
    state = resume(session, checkpoints)
    log = TrainingLog(session, output, state)
    with stop_signals():
        try:
            with checkpoints.finished():
                state = _train_until_done(session, state, checkpoints, log)
        except SharedModelError as error:
            write_limit(output, error.tokens)
            raise
        return _finish(session, state, log)


@phase(LOOP)
def _train_until_done(
    session: Session, state: TrainingState, checkpoints: Checkpoints, log: TrainingLog
) -> TrainingState:
    keys = session.config.train
    try:
        while not state.is_done(session.plan):
            step = state.recorded + 1
            try:
                state = advance(session, state, log)
                state = evaluate_if_due(session, state, log.output, checkpoints)
                state, metrics, findings = check_health(session, state)
            except NotFiniteError as error:
                metrics = error.metrics or state.unrecorded or {}
                findings = [health.not_finite(session.config.health, step, error)]
            if metrics:
                log.step(step, metrics)  # also those that end the training
            state, findings = lower_staleness(state, findings)
            if must_roll_back(session, log, findings, state):
                state = roll_back(session, checkpoints, log, state)
                continue
            if health.is_healthy(session.config.health, state.streaks):
                checkpoints.confirm(step - 1)  # this step's metrics are of the weights that it began with
            if step % keys.save_steps == 0 and step < session.plan.max_steps:
                checkpoints.save(state, keys.save_total_limit)
    except (Stopped, RolloutError) as stop:
        if state.updates:
            checkpoints.save_last(state, keys.save_total_limit)
        fails = "a reward fails" if isinstance(stop, RewardError) else "the engine fails"
        log.stop(state, "told to stop" if isinstance(stop, Stopped) else fails)
        raise
    return state


def advance(session: Session, state: TrainingState, log: TrainingLog) -> TrainingState:
    """Make the next update of the plan, with the generation batches that it needs; its metrics are `unrecorded` then.
    A training that was stopped between an update and its record has made it already.

    Raises NotFiniteError, with all metrics of the update, if `update` does.
    """
    if state.unrecorded is not None:
        return state
    config, plan = session.config, session.plan
    start = time.perf_counter()
    parts: list[tuple[Rollout, int]] = []
    broken: NotFiniteError | None = None
    try:
        with interruptible(session.accelerator):
            for micro_step in plan.micro_steps(state.updates):
                rollout, state = rollout_of(session, micro_step.rollout, state, log)
                parts.append((rollout, micro_step.slice))
            metrics = update(session, update_batch(parts, plan, config), state)
    except NotFiniteError as error:
        if not error.metrics:  # found before the update
            raise
        broken, metrics = error, error.metrics
    kept_entropy, seconds = metrics.pop("kept_entropy", None), time.perf_counter() - start
    if session.demonstrations is not None:
        metrics = {name: value for name, value in metrics.items() if name in METRICS}
    metrics |= _mean_metrics([rollout for rollout, _ in parts])
    metrics |= {"epoch": plan.epoch(state.updates + 1), "num_tokens": state.num_tokens, "step_time": seconds}
    if broken is not None:
        raise broken
    state = adapt_entropy(config.algorithm, state, kept_entropy).with_update(seconds, session.memory.reduced)
    move_reference(session, state)
    move_average(session)
    if state.rollout is not None and not config.algorithm.routing_replay:
        state = replace(state, rollout=replace(state.rollout, routes=None))  # they have been compared
    return replace(state, unrecorded=metrics)


def rollout_of(session: Session, index: int, state: TrainingState, log: TrainingLog) -> tuple[Rollout, TrainingState]:
    """Return generation batch `index`: the one that the last update read, or a new one, which is logged."""
    if state.rollout is not None and state.rollout.index == index:
        return state.rollout, state
    rollout, samples, begun = roll_out(session, index, state)
    if samples:
        log.completions(state.updates + 1, rollout, samples)
    taken = [(sample.turn, sample.row) for sample in samples[:: session.plan.num_generations]]
    state = replace(state.with_rollout(rollout, session.plan), taken=taken, begun=begun)
    state = arrange_epochs(session, state)
    log.pass_rates(state)
    stop_if_asked()
    return rollout, state


def evaluate_if_due(session: Session, state: TrainingState, output: Path, checkpoints: Checkpoints) -> TrainingState:
    """Evaluate the policy on the held-out prompts, every `eval_steps` updates and after the last. Its rewards on each
    are kept in the folder `held_out`, the best policy so far in the folder `best`."""
    keys, step = session.config.train, state.updates
    if not keys.eval_steps or (step % keys.eval_steps and step != session.plan.max_steps):
        return state
    with phase("evaluation"):
        with interruptible(session.accelerator):
            metrics = evaluate_policy(session, state, output / run_files.HELD_OUT_SCORES)
        value = metrics.get(keys.metric_for_best_model, -math.inf)
        state = state.with_evaluation(metrics, value, keys.early_stopping_threshold, keys.early_stopping_patience)
        keep_best(session, state, output / run_files.BEST, checkpoints)
    return state


def check_health(session: Session, state: TrainingState) -> tuple[TrainingState, dict[str, float], list[Finding]]:
    """Return the metrics of the last update, now complete, and the health limits that they break.

    Raises NotFiniteError if one of them is not finite.
    """
    step, metrics = state.updates, state.unrecorded or {}
    if broken := [name for name, value in metrics.items() if not math.isfinite(value)]:
        raise NotFiniteError(f"step {step}: {', '.join(broken)} not finite")
    streaks, findings = health.observe(session.config.health, state.streaks, step, metrics)
    return replace(state, streaks=streaks, unrecorded=None), metrics, findings


@phase("saving the model")
def _finish(session: Session, state: TrainingState, log: TrainingLog) -> dict[str, Any]:
    """Write model and result if what happened is what was planned."""
    expected = session.plan.counts(state.updates)
    if state.counts != expected:
        raise TrainingError(f"after {state.updates} updates the plan says {expected}, counted is {state.counts}")
    if session.config.train.load_best_model_at_end and state.best_step is not None:
        wait_for_all()  # until the main process has written it
        load_best(session, state.best_step, log.output / run_files.BEST)
    shard = sharding(session.config.train, frozen=True)
    save_model(session.model, session.scoring.tokenizer, log.output / run_files.MODEL, session.config.model, shard)
    if session.accelerator.is_main_process:
        sync_to_disk(log.output)  # before result.json says that everything is there
    result = log.finish(state)
    # While this thread waits, gloo's can let go of the last tensors, for which it needs the GIL; destroying the process
    # group joins it with the GIL held.
    wait_for_all()
    if session.sampler is not None:
        session.sampler.engine.close()
    session.accelerator.end_training()
    return result


def _mean_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Mean of the rollouts' metrics, each weighted by its share of the update."""
    names = {name: None for rollout in rollouts for name in rollout.metrics}
    values = {name: [rollout.metrics[name] for rollout in rollouts if name in rollout.metrics] for name in names}
    return {name: sum(found) / len(found) for name, found in values.items()}
