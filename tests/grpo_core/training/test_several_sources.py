"""A training on two sources: each with its rewards, its limit, its metrics; resumed bit for bit."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import polars as pl
import pytest

from grpo_core.config.files import parse_config
from grpo_core.data.curriculum import read_rates
from grpo_core.data.order import Schedule, source_counts, source_rows
from grpo_core.planning.plan import load_plan
from grpo_core.training.loop import train
from tests.conftest import with_keys
from tests.grpo_core.training.training import assert_same, metrics_of, result_of
from tests.sources import sources_run, two_sources


@pytest.fixture(scope="module")
def trained(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    values = two_sources(model_folder, tmp_path_factory.mktemp("data"), max_steps=10, eval_steps=5, save_steps=3)
    run = sources_run(tmp_path_factory.mktemp("run") / "run", values)
    train(run, run / "training")
    return run


def _completions(run: Path) -> pl.DataFrame:
    files = sorted((run / "training" / "completions").glob("*.parquet"))
    return pl.concat([pl.read_parquet(file) for file in files], how="diagonal_relaxed")


@pytest.mark.slow
def test_each_completion_is_scored_by_the_rewards_of_its_source_and_keeps_to_its_limit(trained: Path) -> None:
    found = _completions(trained)
    sums = found.filter(pl.col("prompt").str.contains("+", literal=True))
    lines = found.filter(~pl.col("prompt").str.contains("+", literal=True))
    assert not sums.is_empty() and not lines.is_empty()
    assert sums["rewards/length"].is_null().all() and sums["rewards/numeric_match"].is_not_null().all()
    assert lines["rewards/numeric_match"].is_null().all() and lines["rewards/length"].is_not_null().all()
    assert lines["completion_tokens"].max() == 3 and sums["completion_tokens"].max() == 6


def test_the_prompts_of_each_source_are_seen_as_often_as_the_plan_says(trained: Path) -> None:
    plan, found = load_plan(trained / "plan.json"), _completions(trained)
    groups = Counter("sums" if "+" in prompt else "lines" for prompt in found["prompt"])
    counts = source_counts(plan, parse_config(two_sources(trained, trained)).seed)
    assert {name: found["prompts_seen"] * plan.num_generations for name, found in counts.items()} == groups
    assert [(len(rows), it.prompts_per_epoch) for rows, it in zip(source_rows(plan), plan.sources, strict=True)] == [
        (24, 24),
        (16, 8),
    ]
    assert sum(found["prompts_seen"] for found in counts.values()) == result_of(trained)["counted"]["prompts_seen"]


def test_metrics_of_a_source_are_those_of_its_completions(trained: Path) -> None:
    found, seen = _completions(trained), Counter[str]()
    for row in metrics_of(trained):
        of_step = found.filter(pl.col("step") == row["step"])
        for source, is_sum in (("sums", True), ("lines", False)):
            own = of_step.filter(pl.col("prompt").str.contains("+", literal=True) == is_sum)
            assert (f"reward/{source}" in row) == (not own.is_empty())
            if own.is_empty():
                continue
            seen[source] += 1
            value = own["rewards/numeric_match"].mean() if is_sum else own["rewards/length"].mean() * 0.5  # type: ignore[operator]
            assert row[f"reward/{source}"] == pytest.approx(value)
            assert row[f"completions/mean_length/{source}"] == pytest.approx(own["completion_tokens"].mean())
            assert row[f"completions/clipped_ratio/{source}"] == pytest.approx(own["truncated"].mean())
    assert min(seen["sums"], seen["lines"]) > 2
    evaluated = [row for row in metrics_of(trained) if "eval_reward" in row]
    assert len(evaluated) == 2
    for row in evaluated:
        assert row["eval_reward"] == pytest.approx((10 * row["eval_reward/sums"] + 6 * row["eval_reward/lines"]) / 16)
        assert row["eval_accuracy/sums"] == row["eval_reward/sums"]
        assert row["eval_completions/mean_length/lines"] <= 3


@pytest.mark.slow
def test_a_training_on_sources_is_resumed_bit_for_bit(trained: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    for checkpoint in (run / "training" / "checkpoints").glob("step-*"):
        if int(checkpoint.name.removeprefix("step-")) > 6:
            shutil.rmtree(checkpoint)
    (run / "training" / "result.json").unlink()
    train(run, run / "training")
    assert result_of(run)["resumed_at_step"] == 6
    assert_same(run, trained)


@pytest.mark.slow
def test_a_curriculum_keeps_each_sources_share_and_is_resumed_bit_for_bit(model_folder: Path, tmp_path: Path) -> None:
    """Each source passes by a reward of its own; what an epoch takes of one follows from its own rates."""
    values = two_sources(model_folder, tmp_path, max_steps=20, save_steps=15)
    values["data"]["curriculum"] = {"kind": "variance"}
    values["rewards"][1]["args"] = {"target": 50}  # tells lengths apart
    whole, run = sources_run(tmp_path / "whole", values), tmp_path / "run"
    train(whole, whole / "training")
    plan, found = load_plan(whole / "plan.json"), _completions(whole)
    groups = Counter("sums" if "+" in prompt else "lines" for prompt in found["prompt"])
    assert groups == {name: it["prompts_seen"] * plan.num_generations for name, it in source_counts(plan, 0).items()}
    rates = read_rates(whole / "training" / "pass_rates.parquet", 40)
    assert all(rates.known[own.start : own.stop].any() for own in source_rows(plan))
    assert rates.completions.sum() == len(found)
    plain = Counter(row for index in range(plan.rollouts) for row in Schedule(plan, 0).prompts(index))
    taken = {row: count // plan.num_generations for row, count in Counter(found["row"]).items()}
    for own in source_rows(plan):
        assert [taken.get(row, 0) for row in own] != [plain[row] for row in own], "the curriculum takes others"
    shutil.copytree(whole, run)
    shutil.rmtree(run / "training" / "checkpoints" / "step-000020", ignore_errors=True)
    (run / "training" / "result.json").unlink()
    train(run, run / "training")
    assert result_of(run)["resumed_at_step"] == 15
    assert_same(run, whole)


def test_a_group_without_signal_is_replaced_by_one_of_its_source(model_folder: Path, tmp_path: Path) -> None:
    values = with_keys(two_sources(model_folder, tmp_path, max_steps=4), dynamic_sample=True, max_resample_times=2)
    values["rewards"][1]["args"] = {"target": 50}  # tells lengths apart
    run = sources_run(tmp_path / "run", values)
    train(run, run / "training")
    plan = load_plan(run / "plan.json")
    assert sum(row["dynamic_sampling/resampled_groups"] for row in metrics_of(run)) > 0
    found = Counter("sums" if "+" in prompt else "lines" for prompt in _completions(run)["prompt"])
    counts = source_counts(plan, 0)
    assert found == {name: found["prompts_seen"] * plan.num_generations for name, found in counts.items()}
