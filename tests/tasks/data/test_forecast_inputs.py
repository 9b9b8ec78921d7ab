"""Before data are validated, forecasts know the lengths of the first prompts, where files of this machine tell them;
and what a run's last training says about sampling ahead."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from grpo_core.config.files import parse_config
from grpo_core.planning.ahead_forecast import EarlierSampling
from grpo_core.planning.shapes import PromptLengths
from tasks.data.forecast_inputs import FIRST, earlier_sampling, first_lengths
from tests.conftest import config_values, make_run


def _lengths(model_folder: Path, folder: Path, prompts: list[Any]) -> PromptLengths | None:
    pl.DataFrame({"prompt": prompts}).write_parquet(folder / "train.parquet")
    return first_lengths(parse_config(config_values(model_folder, folder)))


def test_texts_and_conversations_have_the_lengths_of_the_first_ones(model_folder: Path, tmp_path: Path) -> None:
    found = _lengths(model_folder, tmp_path, ["1", "12+34", None, *["123"] * (FIRST - 3), "1" * 50])
    assert found is not None
    assert (found.mean, found.longest) == (pytest.approx(3, abs=0.01), 5)
    assert f"of the first {FIRST - 1} prompts" in found.how
    conversations = [[{"role": "user", "content": "12+34"}], [{"role": "user", "content": "1"}]]
    found = _lengths(model_folder, tmp_path, conversations)
    assert found is not None
    assert (found.mean, found.longest) == (3, 5)


@pytest.mark.parametrize("prompts", [[], [None], [3, 4], [[1], [2]], [""], [{"role": "user"}]])
def test_prompts_that_tell_no_lengths_prevent_no_plan(prompts: list[Any], model_folder: Path, tmp_path: Path) -> None:
    assert _lengths(model_folder, tmp_path, prompts) is None


def test_data_and_tokenizers_that_cannot_be_read_prevent_no_plan(model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert _lengths(tmp_path, tmp_path, ["1"]) is None
    (tmp_path / "tokenizer.json").write_text("damaged")
    assert _lengths(tmp_path, tmp_path, ["1"]) is None
    (tmp_path / "train.parquet").write_text("damaged")
    assert first_lengths(parse_config(config_values(model_folder, tmp_path))) is None
    (tmp_path / "train.parquet").unlink()
    assert first_lengths(parse_config(config_values(model_folder, tmp_path))) is None


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
