"""Evaluation in training: the policy on the held-out prompts, each counted once; the best model kept."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from safetensors.torch import load_file, save_file

from grpo_core.config.metrics import of_source
from grpo_core.data.prompts import rows_at
from grpo_core.data.units import number_units, per_unit
from grpo_core.distributed import own_range, read_tensors, write_tensors
from grpo_core.model.loading import load_trainable_state, trainable_state
from grpo_core.rewards.composition import weighted_sum
from grpo_core.rewards.trl_arguments import TrainerState
from grpo_core.rollout.batch_metrics import logged_metrics
from grpo_core.rollout.collect import Sample, sample_and_score, share_samples
from grpo_core.rollout.records import logged_columns
from grpo_core.rollout.requests import evaluation_request, evaluation_sampling
from grpo_core.system.files import naming, publish, replace_folder
from grpo_core.training.checkpoint import Checkpoints
from grpo_core.training.session import Session
from grpo_core.training.state import TrainingState
from grpo_core.training.weight_sync import sync_weights

WEIGHTS = "weights.safetensors"


def evaluate_policy(session: Session, state: TrainingState, folder: Path) -> dict[str, float]:
    """Return metrics of the current policy; every process answers its part of the prompts, and all get the whole. The
    rewards on each prompt are written to `folder`, one file per evaluated update."""
    held_out, sampler = session.held_out, session.sampler
    assert held_out is not None and sampler is not None
    sync_weights(session, sampler, state)
    requests = [evaluation_request(session.config, held_out, row) for row in own_range(len(held_out.ids))]
    sampling = evaluation_sampling(session.config)
    scoring = replace(session.scoring, state=TrainerState.after(state.updates, session.plan))
    samples, *_ = share_samples(lambda: sample_and_score(sampler.engine, requests, sampling, held_out, scoring))
    if session.accelerator.is_main_process:
        _write(samples, session, folder / f"step-{state.updates:06d}.parquet")
    sources, units = [row.get("source", "") for row in held_out.rows], number_units(held_out.rows, session.config)
    metrics = _figures(samples, [*range(len(samples))], sources, units, session)
    metrics |= {f"eval_{name}": value for name, value in logged_metrics([sample.logged for sample in samples]).items()}
    for name in session.config.evaluated_sources:
        own = [place for place, source in enumerate(sources) if source == name]
        metrics |= of_source(_figures(samples, own, sources, units, session), name)
    return metrics


def _figures(
    samples: Sequence[Sample], places: Sequence[int], sources: Sequence[str], units: np.ndarray, session: Session
) -> dict[str, float]:
    """Metrics of the samples at these places, as far as they were scored: means over units, as in the report.
    `sources` and `units`: of all samples."""
    own = [samples[place] for place in places]
    matrix = np.array([sample.rewards for sample in own])  # (N, K)
    by_name = dict(zip([reward.name for reward in session.scoring.rewards], matrix.T, strict=True))
    judge = session.config.accuracy_reward
    judges = [judge if isinstance(judge, str) else judge[sources[place]] for place in places]
    right = np.array([by_name[name][n] for n, name in enumerate(judges)])
    figures = {
        "eval_reward": weighted_sum(matrix, session.config.rewards),
        "eval_accuracy": np.where(np.isnan(right), np.nan, right == 1),
        **{f"eval_rewards/{name}/mean": values for name, values in by_name.items()},
        "eval_completions/mean_length": np.array([float(sample.completion.sampled_tokens) for sample in own]),
        "eval_completions/clipped_ratio": np.array([float(sample.completion.truncated) for sample in own]),
    }
    of_units = {name: per_unit(values, units[[*places]]) for name, values in figures.items()}
    scored = {name: values[~np.isnan(values)] for name, values in of_units.items()}
    return {name: float(values.mean()) for name, values in scored.items() if len(values)}


def _write(samples: Sequence[Sample], session: Session, path: Path) -> None:
    """Write one row per held-out prompt, in their order; null where a reward did not score, or did not log."""
    matrix = np.array([sample.rewards for sample in samples])  # (N, K)
    names = [f"rewards/{reward.name}" for reward in session.scoring.rewards]
    scores = dict(zip(["reward", *names], [weighted_sum(matrix, session.config.rewards), *matrix.T], strict=True))
    columns = {name: pa.array(values, pa.float64(), from_pandas=True) for name, values in scores.items()}
    columns |= {name: pa.array(texts, pa.string()) for name, texts in logged_columns(samples).items()}
    rows, held_out = [sample.row for sample in samples], session.held_out
    if held_out is not None and held_out.images:
        columns["images"] = pa.array([it["images"] for it in rows_at(held_out.rows, rows)], pa.list_(pa.int64()))
    table = pa.table({"row": rows, **columns}).sort_by("row")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    with naming(temporary):
        pq.write_table(table, temporary)
    publish(temporary, path)


def keep_best(session: Session, state: TrainingState, folder: Path, checkpoints: Checkpoints) -> None:
    """Write the policy under `folder` if this evaluation is the best so far; drop older ones except those that a
    checkpoint names as its best. Called by every process."""
    if state.best_step is None or state.best_step != state.updates:
        return
    final = _best(folder, state.best_step)
    temporary = final.with_suffix(".tmp")
    weights, is_main = trainable_state(session.model), session.accelerator.is_main_process
    if is_main or session.policy.is_sharded:
        temporary.mkdir(parents=True, exist_ok=True)
    if session.policy.is_sharded:
        write_tensors(weights, temporary)
    elif is_main:
        save_file({name: value.contiguous() for name, value in weights.items()}, temporary / WEIGHTS)
    if is_main:
        replace_folder(temporary, final)
        needed = {final, *(_best(folder, step) for step in checkpoints.best_steps())}
        for old in set(folder.iterdir()) - needed:
            shutil.rmtree(old)


def load_best(session: Session, step: int, folder: Path) -> None:
    """Load the policy that was evaluated after `step` into the model."""
    weights = _best(folder, step) / WEIGHTS
    if weights.exists():
        load_trainable_state(session.model, load_file(weights))
    else:
        read_tensors(trainable_state(session.model), weights.parent)


def _best(folder: Path, step: int) -> Path:
    return folder / f"step-{step:06d}"
