"""What a run's last training says about sampling ahead, read from its files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from grpo_core.planning.ahead_forecast import EarlierSampling
from tasks.data.forecast_inputs import earlier_sampling
from tests.conftest import config_values, make_run


def trained_run(folder: Path, steps: list[int], **keys: Any) -> Path:
    """A run whose generation batches were sampled for these updates, four updates in all."""
    run = make_run(folder, config_values(folder, folder, engine="vllm-server", num_generations=2, **keys))
    (run / "training" / "completions").mkdir(parents=True)
    lengths = [3, 5, 4, 4]
    for number, step in enumerate(steps):
        columns = {"prompt_tokens": [6, 6, 8, 8], "completion_tokens": [number + length for length in lengths]}
        table = pl.DataFrame({"step": [step] * 4, **columns})
        table.write_parquet(run / "training" / "completions" / f"rollout-{number:06d}.parquet")
    rows = [
        {"step": step, "step_time": 10.0 * step, "time/generate": float(step), "time/score": 0.5}
        for step in (1, 2, 3, 4)
    ]
    (run / "training" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run


def test_each_generation_batch_has_its_lengths_by_group_and_its_seconds(tmp_path: Path) -> None:
    found = earlier_sampling(trained_run(tmp_path / "run", [1, 2, 3, 4], vllm_num_servers=3, num_processes=2))
    assert isinstance(found, EarlierSampling)
    assert (found.servers, found.processes) == (3, 2)
    assert "3 generation batches of run run" in found.how  # without the first, in which servers warm up
    first = found.batches[0]
    assert first.lengths == [[4, 6], [5, 5]]
    assert (first.prompt_tokens, first.sample_seconds) == (7.0, 2.0)
    assert (first.train_seconds, first.other_seconds) == (17.5, 0.5)


@pytest.mark.parametrize(
    ("steps", "seconds"), [([1, 3], [70.0 - 3.5]), ([1, 1, 3, 3], [30.0 / 2 - 1.5, 70.0 / 2 - 3.5, 70.0 / 2 - 3.5])]
)
def test_batches_for_several_updates_and_updates_of_several_batches_share_seconds(
    tmp_path: Path, steps: list[int], seconds: list[float]
) -> None:
    """Updates 1 and 2 take 30 s, 3 and 4 take 70 s. Each samples for as many seconds as its number, and
    scores for 0.5 s."""
    found = earlier_sampling(trained_run(tmp_path / "run", steps))
    assert isinstance(found, EarlierSampling)
    assert [batch.train_seconds for batch in found.batches] == seconds


def test_a_training_that_tells_nothing_is_named(tmp_path: Path) -> None:
    assert "has not been trained: train some updates with" in str(earlier_sampling(tmp_path / "none"))
    ahead = trained_run(tmp_path / "ahead", [1, 2, 3, 4], max_staleness=1)
    assert "does not show how fast servers are" in str(earlier_sampling(ahead))
    damaged = trained_run(tmp_path / "damaged", [1, 2, 3, 4])
    (damaged / "training" / "metrics.jsonl").write_text("{")
    assert "cannot be read" in str(earlier_sampling(damaged))
