"""Data for forecasts of sampling ahead, from a run's last training: lengths of completions, and seconds."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import polars as pl

from grpo_core import run_files
from grpo_core.errors import ConfigError
from grpo_core.planning.ahead_forecast import EarlierSampling, SampledBatch
from grpo_core.system.tables import read_parquet
from tasks.data.completions import recorded_batches
from tasks.stages.run_directory import read_config
from tasks.stages.table import TRAIN

READ = 64  # the last generation batches
HOW_TO = "train some updates with rollout.max_staleness = 0 on vLLM servers, under this name, and plan again"


def earlier_sampling(run: Path) -> EarlierSampling | str:
    """Return the generation batches of a run's last training, or why they are of no use. A batch gets the seconds of
    all updates that use it; batches of one update share its seconds evenly."""
    training = TRAIN.path(run)
    if not (training / run_files.METRICS).exists():
        return f"the run {run.name} has not been trained: {HOW_TO}"
    try:
        config = read_config(run)
        rows = [json.loads(line) for line in (training / run_files.METRICS).read_text().splitlines()]
        files = recorded_batches(training)
        batches = _batches(rows, files, config.rollout.num_generations)
    except (ConfigError, OSError, ValueError, KeyError, pl.exceptions.PolarsError) as error:
        return f"the last training of run {run.name} cannot be read ({error}): {HOW_TO}"
    if config.rollout.engine != "vllm-server" or config.rollout.max_staleness or not batches:
        return f"the last training of run {run.name} does not show how fast servers are: {HOW_TO}"
    urls = config.rollout.vllm_server_base_urls
    how = f"from the completions and seconds of {len(batches)} generation batches of run {run.name}"
    return EarlierSampling(batches, len(urls) or config.rollout.vllm_num_servers, config.train.num_processes, how)


def _batches(rows: list[dict[str, Any]], files: list[Path], group: int) -> list[SampledBatch]:
    """Collect the generation batches, without the first, during which a server warms up, if there are others."""
    metrics = {row["step"]: row for row in rows}
    sampled_for: defaultdict[int, list[pl.DataFrame]] = defaultdict(list)  # generation batches, by their first update
    for file in files[-READ:]:
        table = read_parquet(file, columns=["step", "prompt_tokens", "completion_tokens"])
        step = int(table["step"][-1])
        sampled_for[step].append(table.filter(pl.col("step") == step))  # without rows that a roll-back has undone
    found = []
    starts = sorted(step for step in sampled_for if step in metrics)
    for step, following in zip(starts, [*starts[1:], max(metrics) + 1], strict=True):
        generated, scored = metrics[step]["time/generate"], metrics[step]["time/score"]
        whole = sum(metrics[update]["step_time"] for update in range(step, following)) / len(sampled_for[step])
        for table in sampled_for[step]:
            lengths = table["completion_tokens"].to_list()
            found.append(
                SampledBatch(
                    lengths=[lengths[first : first + group] for first in range(0, len(lengths), group)],
                    prompt_tokens=sum(table["prompt_tokens"].to_list()) / len(lengths),
                    sample_seconds=generated,
                    train_seconds=whole - generated - scored,
                    other_seconds=scored,
                )
            )
    return found[1:] or found
