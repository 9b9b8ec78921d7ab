"""A run's directory as its stages leave it, from made-up figures: seconds instead of a training."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from grpo_core.config.files import dump_config, parse_config
from grpo_core.data.order import source_counts
from grpo_core.data.recording import write_batch
from grpo_core.evaluation.comparison import compare_policies
from grpo_core.evaluation.outcomes import deciding_metric
from grpo_core.planning.plan import make_plan, plan_inputs

NUM_PROMPTS = 60
UPDATES = 50


def values_of(name: str, **sections: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration's values; `sections` are laid over them."""
    values: dict[str, Any] = {
        "name": name,
        "model": {"name_or_path": "base"},
        "data": {"train": "train.parquet", "eval": "eval.parquet"},
        "rewards": [{"function": "numeric_match"}],
        "rollout": {"num_generations": 4, "max_completion_length": 8},
        "train": {"per_device_train_batch_size": 16, "max_steps": UPDATES},
    }
    return values | {section: {**values.get(section, {}), **keys} for section, keys in sections.items()}


def outcomes_of(seed: int, rate: float) -> np.ndarray:
    """Right or wrong, 1 or 0, for each prompt. (NUM_PROMPTS,)"""
    return (np.random.default_rng(seed).random(NUM_PROMPTS) < rate).astype(float)


def samples_of(
    right: Mapping[str, np.ndarray], name: str = "held-out", completion: str = "7", categories: Sequence[str] = ()
) -> pl.DataFrame:
    """samples.parquet of one evaluation set, from the outcomes of each policy."""
    count = len(next(iter(right.values())))
    columns: dict[str, Any] = {
        "set": [name] * count,
        "row": range(count),
        "sample": [0] * count,
        "prompt": [f"{name} {row}+1=" for row in range(count)],
        "answer": [str(row + 1) for row in range(count)],
    }
    if categories:
        columns["category"] = [categories[row % len(categories)] for row in range(count)]
    for policy, values in right.items():
        columns[f"{policy}/completion"] = [f"{policy} {completion}"] * count
        columns[f"{policy}/completion_tokens"] = [3 + row % 4 for row in range(count)]
        columns[f"{policy}/truncated"] = [False] * count
        columns[f"{policy}/rewards/numeric_match"] = values
        columns[f"{policy}/kl"] = np.full(count, 0.0 if policy == "base" else 0.1)
    return pl.DataFrame(columns)


def with_conversations(samples: pl.DataFrame) -> pl.DataFrame:
    """The samples as conversations with a tool: those of even rows call it once in vain, and those of every tenth row
    lost their environment."""
    policies = [name.removesuffix("/completion") for name in samples.columns if name.endswith("/completion")]
    prompts = [[{"role": "user", "content": text}] for text in samples["prompt"]]
    columns: dict[str, Any] = {"prompt": prompts}
    for policy in policies:
        said = samples[f"{policy}/completion"].to_list()
        failures = ["tool add: its time was up" if row % 10 == 9 else "" for row in range(samples.height)]
        columns[f"{policy}/opening"] = [f" Begin at {row}." for row in range(samples.height)]
        columns[f"{policy}/conversation"] = [json.dumps(_messages(row, last)) for row, last in enumerate(said)]
        columns[f"{policy}/turns"] = [3 if row % 2 == 0 else 2 for row in range(samples.height)]
        columns[f"{policy}/tool_calls"] = [2 if row % 2 == 0 else 1 for row in range(samples.height)]
        columns[f"{policy}/failed_tool_calls"] = [1 if row % 2 == 0 else 0 for row in range(samples.height)]
        columns[f"{policy}/environment_failure"] = failures
        given = zip(samples[f"{policy}/rewards/numeric_match"], failures, strict=True)
        columns[f"{policy}/rewards/numeric_match"] = [None if failure else value for value, failure in given]
    return samples.with_columns(**{name: pl.Series(values) for name, values in columns.items()})


def _messages(row: int, last: str) -> list[dict[str, Any]]:
    def call(**arguments: Any) -> dict[str, Any]:
        return {"type": "function", "function": {"name": "add", "arguments": arguments}}

    vain = [
        {"role": "assistant", "content": "", "tool_calls": [call(first="<b>one</b>", second=row)]},
        {"role": "tool", "name": "add", "content": "Error: TypeError: unsupported operand <i>str</i>"},
    ]
    return [
        *(vain if row % 2 == 0 else []),
        {"role": "assistant", "content": "I add the two numbers.", "tool_calls": [call(first=1, second=row)]},
        {"role": "tool", "name": "add", "content": str(1 + row)},
        {"role": "assistant", "content": last},
    ]


def metrics_of(updates: int = UPDATES, **further: float) -> list[dict[str, float]]:
    return [
        {
            "step": step,
            "reward": 0.3 + 0.005 * step,
            "frac_reward_zero_std": 0.2,
            "completions/mean_length": 4.0,
            "completions/clipped_ratio": 0.0,
            "entropy": 0.5,
            "grad_norm": 1.0,
            "learning_rate": 1e-4,
            "num_tokens": 100 * step,
            "step_time": 1.0,
            "time/generate": 0.3,
            "time/score": 0.1,
            **further,
        }
        for step in range(1, updates + 1)
    ]


def made_up_run(
    folder: Path,
    values: Mapping[str, Any],
    samples: pl.DataFrame,
    metrics: Sequence[Mapping[str, float]],
    key: str = "same",
) -> Path:
    """The directory, without data and model. `samples`: as samples.parquet; `key`: the evaluation's."""
    config = parse_config(dict(values))
    policies = [policy for policy in ("base", "champion", "trained") if f"{policy}/completion" in samples.columns]
    plan = make_plan(plan_inputs(config, *(24 for _ in config.data.origins)))
    counts = plan.counts(plan.max_steps)
    result = {
        "counted": counts,
        "planned": counts,
        **dict.fromkeys(("stopped_early_at_step", "best_step", "best_value", "resumed_at_step")),
        "sampled_completions": counts["completions"],
        "sampled_tokens": 9000,
        "train_seconds": 50.0,
        "roll_backs": 0,
        "max_staleness": 0,
        "ran_out_of_memory": False,
        "steps_without_metrics": [],
        "seconds": 63.0,
    }
    evaluation = {
        "key": key,
        "policies": policies,
        "champion": {"model_name": "sums", "version": "3"} if "champion" in policies else None,
        "accuracy_reward": config.accuracy_reward,
        "deciding_metric": deciding_metric(samples, config.accuracy_reward),
        "temperature": config.evaluation.temperature,
        "num_samples": config.evaluation.num_samples,
        "confidence": config.evaluation.confidence,
        "sets": compare_policies(samples, config, policies),
    }
    lengths = {"tokenized": 24, "of": 24, "mean": 6.0, "median": 6.0, "p95": 7.0, "max": 8}
    data = {
        "num_prompts": {"train": 24, "eval": NUM_PROMPTS},
        "rows_read": {"train": 25, "eval": NUM_PROMPTS},
        "parts": {
            "train": {"rows_read": 25, "num_prompts": 24, "source": "train.parquet"},
            "eval": {"rows_read": NUM_PROMPTS, "num_prompts": NUM_PROMPTS, "source": "eval.parquet"},
        },
        "lengths": {"train": lengths, "eval": lengths},
        "findings": [],
        "seconds": 4.0,
    }
    forecasts = {
        "time": {
            "wall_time_hours": 0.02,
            "parts_hours": {"updates": 0.01, "start": 0.01},
            "gpu_hours": 0.02,
            "how": "a guess",
        }
    }
    receipts = {
        "dataset/report.json": data,
        "plan.json": {
            "plan": asdict(plan),
            "sources": source_counts(plan, config.seed),
            "forecasts": forecasts,
            "seconds": 1.0,
        },
        "training/result.json": result,
        "evaluation/report.json": evaluation,
    }
    for path, content in receipts.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(json.dumps(content))
    (folder / "config.toml").write_text(dump_config(config))
    (folder / "training" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))
    samples.write_parquet(folder / "evaluation" / "samples.parquet")
    return folder


def sampled(step: int, row: int, rewards: Mapping[str, float | None], **columns: Any) -> dict[str, Any]:
    """A row of completions/; `columns` are laid over it."""
    ids = columns.get("completion_ids", [1, 2, 3])
    return {
        "step": step,
        "prompt": f"{row}+1=",
        "completion": f"{row + 1}",
        "advantage": 0.0,
        "prompt_tokens": 3,
        "completion_tokens": len(ids),
        "truncated": False,
        "row": row,
        "prompt_ids": [4, 5, 6],
        "completion_ids": ids,
        "sampling_logprobs": [-0.5] * len(ids),
        **{f"rewards/{name}": value for name, value in rewards.items()},
        **columns,
    }


def write_sampled(training: Path, batches: Sequence[Sequence[Mapping[str, Any]]], num_generations: int) -> None:
    """completions/ in a training's folder, from the rows of its generation batches."""
    (training / "completions").mkdir(parents=True, exist_ok=True)
    for number, rows in enumerate(batches):
        table = pa.Table.from_pylist([dict(row) for row in rows])
        path = training / "completions" / f"rollout-{number:06d}.parquet"
        write_batch(table, {"num_generations": num_generations}, path.with_suffix(".tmp"))
        path.with_suffix(".tmp").rename(path)
