"""Base and trained policy on the same held-out prompts, each prompt once; the paired difference.

Entry point: `python -m grpo_core.evaluate RUN_DIR`.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from grpo_core.environment import quiet_libraries


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="grpo_core.evaluate", description="Compare RUN's trained policy with its base."
    )
    parser.add_argument(
        "run", type=Path, help="run directory with config.toml, dataset/eval.parquet and training/model"
    )
    parser.add_argument("--output", type=Path, help="where to write; default RUN/evaluation")
    arguments = parser.parse_args()
    output = arguments.output or arguments.run / "evaluation"
    output.mkdir(parents=True, exist_ok=True)
    quiet_libraries()
    report = evaluate(arguments.run, output)
    (output / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    print(f"accuracy: base {report['base']['accuracy']:.1%}, trained {report['trained']['accuracy']:.1%}")


def evaluate(run: Path, output: Path) -> dict[str, Any]:
    """Report of both policies; writes samples.parquet (a row a prompt) under `output`."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    import torch

    from grpo_core.config import load_config
    from grpo_core.data import load_prompts, load_tokenizer
    from grpo_core.held_out import evaluation_request, evaluation_sampling
    from grpo_core.policy import load_model
    from grpo_core.precision import in_bfloat16
    from grpo_core.rewards.contract import resolve
    from grpo_core.rollout.collect import Sample, sample_and_score
    from grpo_core.rollout.engine import make_engine

    config = load_config(run / "config.toml")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = load_tokenizer(config.model)
    prompts = load_prompts(run / "dataset" / "eval.parquet", tokenizer)
    rewards = [resolve(reward) for reward in config.rewards]
    requests = [evaluation_request(config, row, ids) for row, ids in enumerate(prompts.ids)]
    sampling = evaluation_sampling(config)

    def in_precision(model: Any) -> Any:
        return in_bfloat16(model) if config.train.mixed_precision == "bf16" else model

    base = in_precision(load_model(config.model.name_or_path, config.model.revision).to(device))
    max_length = prompts.max_length + config.evaluation_length
    engine = make_engine(config, config.model.name_or_path, base, tokenizer, max_length)
    samples: dict[str, list[Sample]] = {}
    for name in ("base", "trained"):
        if name == "trained":
            engine.sync_weights(in_precision(load_model(run / "training" / "model").to(device)))
        print(f"evaluating the {name} policy on {len(requests)} held-out prompts", flush=True)
        rows = range(len(requests))
        samples[name], _ = sample_and_score(engine, requests, rows, sampling, prompts, tokenizer, rewards)
    engine.close()

    columns: dict[str, Any] = {"prompt": [row["prompt"] for row in prompts.rows]}
    if "answer" in prompts.rows[0]:
        columns["answer"] = [row["answer"] for row in prompts.rows]
    for name, drawn in samples.items():
        columns[f"{name}/completion"] = [sample.text for sample in drawn]
        columns[f"{name}/completion_tokens"] = [len(sample.completion.ids) for sample in drawn]
        columns[f"{name}/truncated"] = [sample.completion.truncated for sample in drawn]
        for k, reward in enumerate(rewards):
            columns[f"{name}/rewards/{reward.name}"] = [sample.rewards[k] for sample in drawn]
    pq.write_table(pa.table(columns), output / "samples.parquet")
    weights = {reward.name: reward.weight for reward in rewards}
    options = (config.evaluation.bootstrap_resamples, config.evaluation.confidence, config.seed)
    report = compare(columns, weights, config.accuracy_reward, *options)
    return {**report, "temperature": config.evaluation.temperature}


def compare(
    columns: dict[str, Any],
    weights: dict[str, float],
    accuracy_reward: str,
    resamples: int,
    confidence: float,
    seed: int,
) -> dict[str, Any]:
    """Figures of each policy and their paired differences, from the columns of samples.parquet.

    accuracy: share of right answers (the accuracy reward is 1) among the prompts it scored. reward: mean weighted sum.
    """
    report: dict[str, Any] = {"num_prompts": len(columns["prompt"]), "accuracy_reward": accuracy_reward}
    outcomes: dict[str, dict[str, np.ndarray]] = {}
    for policy in ("base", "trained"):
        scores = {name: np.array(columns[f"{policy}/rewards/{name}"], dtype=float) for name in weights}
        right = scores[accuracy_reward]
        outcomes[policy] = {
            "accuracy": np.where(np.isnan(right), np.nan, right == 1),
            "reward": np.sum([weights[name] * np.nan_to_num(values) for name, values in scores.items()], axis=0),
        }
        report[policy] = {
            **{name: _mean(values) for name, values in outcomes[policy].items()},
            **{f"rewards/{name}/mean": _mean(values) for name, values in scores.items()},
            "completions/mean_length": _mean(np.array(columns[f"{policy}/completion_tokens"], dtype=float)),
            "completions/clipped_ratio": _mean(np.array(columns[f"{policy}/truncated"], dtype=float)),
        }
    report["difference"] = {
        name: paired_bootstrap(outcomes["base"][name], outcomes["trained"][name], resamples, confidence, seed)
        for name in ("accuracy", "reward")
    }
    return report


def paired_bootstrap(
    before: Sequence[float] | np.ndarray,
    after: Sequence[float] | np.ndarray,
    resamples: int,
    confidence: float,
    seed: int,
) -> dict[str, float]:
    """Mean of after − before over prompts, with its percentile-bootstrap interval (Efron & Tibshirani 1993).

    Prompts are resampled, not outcomes: what makes a prompt hard is common to both and cancels. Prompts that either
    side leaves unscored (NaN) are left out.
    """
    from scipy.stats import bootstrap

    difference = np.asarray(after, dtype=float) - np.asarray(before, dtype=float)
    difference = difference[~np.isnan(difference)]
    if len(difference) == 0:
        return {"mean": math.nan, "low": math.nan, "high": math.nan, "confidence": confidence}
    mean = float(difference.mean())
    if np.ptp(difference) == 0:  # also a single prompt: every resample is the same
        return {"mean": mean, "low": mean, "high": mean, "confidence": confidence}
    interval = bootstrap(
        (difference,),
        np.mean,
        n_resamples=resamples,
        confidence_level=confidence,
        method="percentile",
        batch=max(1, 10_000_000 // len(difference)),
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return {"mean": mean, "low": float(interval.low), "high": float(interval.high), "confidence": confidence}


def _mean(values: np.ndarray) -> float:
    return float(np.nanmean(values)) if not np.isnan(values).all() else math.nan


if __name__ == "__main__":
    main()
