"""What rewards log in a training: metrics, columns of the records, held-out prompts; and the place they are told."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from grpo_core.evaluation.run import evaluate
from grpo_core.training.loop import train
from tests.conftest import with_keys
from tests.grpo_core.training.training import assert_same, metrics_of, trained_run

LOGGING = """
from fractions import Fraction
def logging(completions, answer, trainer_state, log_extra, log_metric):
    log_extra("place", [f"{trainer_state.global_step}/{trainer_state.max_steps}"] * len(completions))
    log_extra("length", [len(completion) for completion in completions])
    log_metric("length", Fraction(sum(map(len, completions)), len(completions)))
    return [-float(len(completion)) for completion in completions]
async def later(completions, trainer_state, log_metric):
    log_metric("length", Fraction(sum(map(len, completions)), len(completions)))
    log_metric("step", trainer_state.global_step)
    return [float(trainer_state.epoch)] * len(completions)
"""


@pytest.fixture
def logging(values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    (tmp_path / "logging_rewards.py").write_text(LOGGING)
    monkeypatch.syspath_prepend(tmp_path)
    rewards = [{"function": f"logging_rewards:{name}", "range": [-100.0, 100.0]} for name in ("logging", "later")]
    keys = {"max_steps": 6, "save_steps": 2, "eval_steps": 3, "num_iterations": 2}
    return with_keys({**values, "rewards": rewards, "evaluation": {"accuracy_reward": "logging"}}, **keys)


def test_rewards_know_the_update_and_what_they_log_is_in_metrics_and_records(
    logging: dict[str, Any], tmp_path: Path
) -> None:
    run = trained_run(tmp_path / "run", logging)
    found = pl.concat(pl.read_parquet(file) for file in sorted((run / "training" / "completions").iterdir()))
    assert (found["logged/logging/place"] == (found["step"] - 1).cast(pl.String) + "/6").all()
    lengths = pl.col("completion").str.len_chars()
    assert (found["logged/logging/length"] == found.select(lengths.cast(pl.String)).to_series()).all()
    metrics = metrics_of(run)
    for batch, of_batch in found.group_by("step"):
        (row,) = (row for row in metrics if row["step"] == batch[0])
        mean = of_batch["completion"].str.len_chars().mean()
        assert row["logged/logging/length"] == pytest.approx(mean, rel=1e-12)
        assert row["logged/later/length"] == pytest.approx(mean, rel=1e-12), "called group by group"
    held_out = pl.read_parquet(run / "training" / "held_out" / "step-000003.parquet")
    assert set(held_out["logged/logging/place"]) == {"3/6"}
    assert metrics[2]["eval_logged/later/step"] == 3.0


@pytest.mark.slow
def test_an_evaluation_whose_rewards_read_the_place_is_of_the_trainings_end(
    logging: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [trained_run(tmp_path / f"of-{steps}", logging, max_steps=steps, eval_steps=None) for steps in (1, 2)]
    samples, keys = [run / "samples.parquet" for run in runs], set()
    for run, earlier, steps in zip(runs, (None, samples[0]), (1, 2), strict=True):
        keys.add(evaluate(run, run, earlier=earlier, known=["base"] if earlier else [])["key"])
        told = pl.read_parquet(run / "samples.parquet").select("^.*/logged/logging/place$")
        assert told.columns == ["base/logged/logging/place", "trained/logged/logging/place"]
        assert set(told.to_series(0)) == set(told.to_series(1)) == {f"{steps}/{steps}"}
    assert len(keys) == 2, "what was judged at the end of another training cannot be compared"
    assert capsys.readouterr().out.count("evaluating the base policy") == 2


@pytest.mark.slow
def test_a_training_that_goes_on_logs_the_same_figures_and_columns(logging: dict[str, Any], tmp_path: Path) -> None:
    whole = trained_run(tmp_path / "whole", logging)
    run = shutil.copytree(whole, tmp_path / "run")
    (run / "training" / "result.json").unlink()
    assert train(run, run / "training")["resumed_at_step"] == 4
    assert_same(run, whole)
    names = [sorted(file.name for file in (it / "training" / "completions").iterdir()) for it in (run, whole)]
    assert names[0] == names[1]
    for name in names[0]:
        parts = [pl.read_parquet(it / "training" / "completions" / name) for it in (run, whole)]
        assert parts[0].equals(parts[1])
