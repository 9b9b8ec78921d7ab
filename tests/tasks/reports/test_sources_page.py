"""The page of a run on several sources has the curves, the counts and the evaluation of each."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest

from grpo_core.data.order import source_counts
from grpo_core.planning.plan import read_plan
from tasks.reports.record import read_record
from tasks.reports.report import report_page
from tasks.tracking.evaluated import standings_of
from tests.made_up import NUM_PROMPTS, made_up_run, metrics_of, outcomes_of, samples_of, values_of
from tests.pages import Page

SOURCES = [{"name": "sums", "train": "a", "eval": "b"}, {"name": "products", "train": "c", "eval": "d"}]


@pytest.mark.slow
def test_the_page_has_each_source_s_curves_counts_and_figures(tmp_path: Path) -> None:
    values = values_of("both") | {"data": {"sources": SOURCES}}
    names = ["sums", "products"] * (NUM_PROMPTS // 2)
    samples = samples_of({"base": outcomes_of(0, 0.4), "trained": outcomes_of(1, 0.8)})
    samples = samples.with_columns(source=pl.Series(names))
    by_source = {f"{name}/{source}": 0.3 for source in ("sums", "products") for name in ("reward", "eval_accuracy")}
    record = read_record(made_up_run(tmp_path / "run", values, samples, metrics_of(**by_source)))
    text = Page(report_page(record, 12.0, {}, "http://mlflow", "")).text
    for title in ("Reward by source", "Accuracy on held-out prompts by source, %"):
        assert title in text
    assert "numeric_match (sums) or numeric_match (products) gives it 1" in text
    for source, counts in source_counts(read_plan(record.plan["plan"]), record.config.seed).items():
        assert f"{source}{counts['num_prompts']:,}{counts['prompts_per_epoch']:,}{counts['prompts_seen']:,}" in "".join(
            text.split()
        )
        assert f"{source}, {NUM_PROMPTS // 2} prompts" in text


@pytest.mark.slow
def test_a_prompt_s_standing_is_by_the_reward_of_its_source(tmp_path: Path) -> None:
    values = values_of("both") | {"data": {"sources": SOURCES}}
    samples = samples_of({"base": outcomes_of(0, 0.0), "trained": outcomes_of(1, 1.0)})
    samples = samples.with_columns(source=pl.Series(["sums", "products"] * (NUM_PROMPTS // 2)))
    record = read_record(made_up_run(tmp_path / "run", values, samples, metrics_of()))
    assert standings_of(samples, "held-out", record.evaluation, record.config) == {"base": ["better"] * NUM_PROMPTS}
