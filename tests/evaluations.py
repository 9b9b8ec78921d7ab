"""Evaluations as their stage leaves them, from simulated policies, and model versions in MLflow that carry them."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from grpo_core.config.files import dump_config, parse_config
from grpo_core.config.run import RunConfig

SETS = ("held-out", "general")


def promotion_config(*rewards: dict[str, Any], **promotion: Any) -> RunConfig:
    return parse_config(
        {
            "name": "simulated",
            "model": {"name_or_path": "base"},
            "data": {"train": "train.parquet", "eval": "eval.parquet"},
            "rewards": list(rewards) or [{"function": "numeric_match"}, {"function": "length", "weight": 0.5}],
            "evaluation": {"sets": [{"name": "general", "data": "general.parquet"}]},
            "promotion": promotion,
        }
    )


def simulated_samples(
    seed: int,
    gains: Mapping[str, Mapping[str, float]],
    num_prompts: int = 120,
    num_samples: int = 1,
    tokens: Mapping[str, float] | None = None,
) -> pl.DataFrame:
    """A samples.parquet. A prompt's rate of right answers is drawn at random, with mean 0.5, and is common to the
    policies; `gains[policy].get(set, 0)` is what a policy has more, on average over prompts. Completions have
    `tokens[policy]` (20) tokens in the mean."""
    rng = np.random.default_rng(seed)
    tables = []
    for name in SETS:
        rates = np.repeat(rng.beta(2, 2, num_prompts), num_samples)
        table: dict[str, Any] = {
            "set": [name] * len(rates),
            "prompt": np.repeat([f"prompt {row}" for row in range(num_prompts)], num_samples),
            "row": np.repeat(np.arange(num_prompts), num_samples),
            "sample": np.tile(np.arange(num_samples), num_prompts),
        }
        for policy, of_set in gains.items():
            gain = of_set.get(name, 0.0)
            # Half of a gain's mean is in what is still missing, since rates have mean 0.5.
            moved = rates + 2 * gain * ((1 - rates) if gain > 0 else rates)
            table[f"{policy}/rewards/numeric_match"] = (rng.random(len(rates)) < moved).astype(float)
            table[f"{policy}/rewards/length"] = rng.normal(0, 0.1, len(rates))
            table[f"{policy}/completion_tokens"] = rng.poisson((tokens or {}).get(policy, 20), len(rates))
            table[f"{policy}/truncated"] = np.zeros(len(rates), dtype=bool)
            if policy != "base":
                table[f"{policy}/kl"] = rng.gamma(2, 0.05, len(rates))
        tables.append(pl.DataFrame(table))
    return pl.concat(tables)


def fixed_samples(outcomes: Mapping[str, list[float | None]]) -> pl.DataFrame:
    """A samples.parquet in which each policy's answers to the held-out prompts are right (1), wrong (0) or unscored."""
    [count] = {len(values) for values in outcomes.values()}
    figures: dict[str, Any] = {}
    for policy, right in outcomes.items():
        figures[f"{policy}/rewards/numeric_match"] = right
        figures[f"{policy}/rewards/length"] = [0.0] * count
        figures[f"{policy}/completion"] = [f"{policy} says {row}" for row in range(count)]
        figures[f"{policy}/completion_tokens"] = [20] * count
        figures[f"{policy}/truncated"] = [False] * count
        if policy != "base":
            figures[f"{policy}/kl"] = [0.25] * count
    rows = {"row": range(count), "sample": [0] * count, "prompt": [f"prompt {row}" for row in range(count)]}
    return pl.DataFrame({"set": ["held-out"] * count, **rows, **figures})


def register_version(
    model: str,
    samples: pl.DataFrame,
    key: str = "same",
    champion: Mapping[str, Any] | None = None,
    config: RunConfig | None = None,
    tags: Mapping[str, str] | None = None,
) -> str:
    """Number of a new version of a registered model, candidate now, whose MLflow run has this evaluation; and further
    tags."""
    from mlflow.exceptions import MlflowException

    from tasks.registry.judging import prompts_tags
    from tasks.tracking.runs import connect

    client = connect()
    run = client.create_run("0")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "evaluation").mkdir()
        (folder / "config.toml").write_text(dump_config(config or promotion_config()))
        (folder / "evaluation" / "report.json").write_text(json.dumps({"key": key, "champion": champion}))
        samples.write_parquet(folder / "evaluation" / "samples.parquet")
        client.log_artifacts(run.info.run_id, str(folder), "registered/this")
    try:
        client.create_registered_model(model)
    except MlflowException as error:
        assert error.error_code == "RESOURCE_ALREADY_EXISTS", error
    tags = {"record": "registered/this", **prompts_tags(samples), **(tags or {})}
    version = client.create_model_version(model, f"{run.info.artifact_uri}/model", run.info.run_id, tags)
    client.set_registered_model_alias(model, "candidate", version.version)
    return str(version.version)
