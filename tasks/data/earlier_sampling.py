"""What a run's last training says about sampling ahead: the lengths of its completions, and its seconds."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import polars as pl

from grpo_core.errors import ConfigError
from grpo_core.planning.ahead_forecast import EarlierSampling, SampledBatch
from tasks.stages.run_directory import read_config
from tasks.stages.table import TRAIN

READ = 64  # generation batches: the last ones
HOW_TO = "train some updates with rollout.max_staleness = 0 on vLLM servers, under this name, and plan again"


def earlier_sampling(run: Path) -> EarlierSampling | str:
    """The generation batches of a run's last training, or why they tell nothing. Batches that were read by a part of an
    update, or by several, share its seconds evenly."""
    training = TRAIN.path(run)
    if not (training / "metrics.jsonl").exists():
        return f"the run {run.name} has not been trained: {HOW_TO}"
    try:
        config = read_config(run)
        rows = [json.loads(line) for line in (training / "metrics.jsonl").read_text().splitlines()]
        files = sorted((training / "completions").glob("*.parquet"))
        batches = _batches(rows, files, config.rollout.num_generations)
    except (ConfigError, OSError, ValueError, KeyError, pl.exceptions.PolarsError) as error:
        return f"the last training of run {run.name} cannot be read ({error}): {HOW_TO}"
    if config.rollout.engine != "vllm-server" or config.rollout.max_staleness or not batches:
        return f"the last training of run {run.name} does not tell how fast servers are: {HOW_TO}"
    urls = config.rollout.vllm_server_base_urls
    how = f"from the completions and seconds of {len(batches)} generation batches of run {run.name}"
    return EarlierSampling(batches, len(urls) or config.rollout.vllm_num_servers, config.train.num_processes, how)


def _batches(rows: list[dict[str, Any]], files: list[Path], group: int) -> list[SampledBatch]:
    """Without the first, in which a server warms up, if there are others."""
    seconds = {row["step"]: row for row in rows}
    tables = [pl.read_parquet(file, columns=["step", "prompt_tokens", "completion_tokens"]) for file in files[-READ:]]
    starts = [int(table["step"][-1]) for table in tables]
    of_step: defaultdict[int, list[int]] = defaultdict(list)  # batches, by the update that they were sampled for
    for number, step in enumerate(starts):
        of_step[step].append(number)
    found = []
    first_steps = sorted(of_step)
    for step, following in zip(first_steps, [*first_steps[1:], max(seconds) + 1], strict=True):
        updates = [seconds[each] for each in range(step, following) if each in seconds]
        if not updates:
            continue
        count = len(of_step[step])
        generated, scored = updates[0]["time/generate"], updates[0]["time/score"]
        whole = sum(row["step_time"] for row in updates) / count
        for number in of_step[step]:
            table = tables[number].filter(pl.col("step") == step)
            lengths = table["completion_tokens"].to_list()
            found.append(
                SampledBatch(
                    lengths=[lengths[first : first + group] for first in range(0, len(lengths), group)],
                    prompt_tokens=float(table["prompt_tokens"].sum()) / len(lengths),
                    sample_seconds=generated,
                    train_seconds=whole - generated - scored,
                    other_seconds=scored,
                )
            )
    return found[1:] or found
