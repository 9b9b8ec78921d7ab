"""The page of a run says what its files say, shows what others wrote as text, and needs nothing but itself."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from matplotlib.figure import Figure

from grpo_core.data.order import source_counts
from grpo_core.planning.plan import make_plan, read_plan
from grpo_core.planning.rules import PlanInputs
from tasks.rendering import drawing
from tasks.reports.record import Record, read_record
from tasks.reports.report import report_page
from tasks.reports.training_sections import plan_and_outcome, stage_times, time_of_updates
from tasks.tracking.evaluated import standings_of
from tests.made_up import NUM_PROMPTS, made_up_run, metrics_of, outcomes_of, samples_of, values_of, with_conversations
from tests.pages import Page

MLFLOW = "http://127.0.0.1:5000/#/experiments/1/runs/abc"
EVIL = "</pre><script>alert('got in')</script><img src=x onerror=alert(1)>"


def _html(record: Record) -> str:
    return report_page(record, 12.0, {"train": "0123abcd"}, MLFLOW, "bcdcd2a8e0af with uncommitted changes")


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Record:
    """With a champion, two sets, categories, evaluation in training and KL."""
    right = {"base": outcomes_of(0, 0.4), "champion": outcomes_of(1, 0.5), "trained": outcomes_of(2, 0.9)}
    general = {policy: 1 - values for policy, values in right.items()}
    samples = pl.concat(
        [samples_of(right, completion=EVIL, categories=("short", "long")), samples_of(general, "general")],
        how="diagonal",
    )
    values = values_of("full", evaluation={"sets": [{"name": "general", "data": "general.parquet"}]})
    metrics = metrics_of(kl=0.05, eval_reward=0.6, eval_accuracy=0.6)
    return read_record(made_up_run(tmp_path_factory.mktemp("full"), values, samples, metrics))


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Record:
    samples = samples_of({"base": outcomes_of(0, 0.4), "trained": outcomes_of(1, 0.4)})
    return read_record(made_up_run(tmp_path_factory.mktemp("bare"), values_of("bare"), samples, metrics_of()))


@pytest.fixture(scope="module")
def full_html(full: Record) -> str:
    return _html(full)


@pytest.fixture(scope="module")
def full_page(full_html: str) -> Page:
    return Page(full_html)


@pytest.fixture(scope="module")
def bare_page(bare: Record) -> Page:
    return Page(_html(bare))


def _figures(found: dict[str, Any]) -> list[str]:
    return [f"{found['mean']:.1%}", f"[{100 * found['low']:.1f}, {100 * found['high']:.1f}]"]


@pytest.mark.slow
def test_the_page_has_the_figures_of_every_set_category_and_policy(full: Record, full_page: Page) -> None:
    text = full_page.text
    parts = [*full.evaluation["sets"].values(), *full.evaluation["sets"]["held-out"]["categories"].values()]
    assert len(parts) == 4
    for part in parts:
        for policy in ("base", "champion", "trained"):
            assert all(figure in text for figure in _figures(part["policies"][policy]["accuracy"]))
        for rival in ("base", "champion"):
            assert f"{100 * part['differences'][rival]['accuracy']['mean']:+.1f} points" in text
    for name in ("general", "short", "long", "champion (version 3)", "0123abcd"):
        assert name in text


@pytest.mark.slow
def test_the_verdict_is_on_the_champion_and_its_tone_is_the_test_s(
    full: Record, full_page: Page, bare_page: Page
) -> None:
    difference = full.evaluation["sets"]["held-out"]["differences"]["champion"]["accuracy"]
    assert difference["p_value"] < 0.05
    assert f"Better than the champion (version 3) by {100 * difference['mean']:.1f} points" in full_page.text
    assert f"a true gain of {100 * difference['minimum_detectable']:.1f} points or more is" in full_page.text
    assert ("div", {"class": "verdict better"}) in full_page.tags
    assert ("div", {"class": "verdict open"}) in bare_page.tags
    assert "No difference from the base could be shown" in bare_page.text


@pytest.mark.slow
def test_a_page_on_prompts_in_groups_counts_the_groups(tmp_path: Path) -> None:
    values = values_of("sums", evaluation={"group_column": "passage"})
    samples = samples_of({"base": outcomes_of(0, 0.4), "trained": outcomes_of(1, 0.45)})
    samples = samples.with_columns(group=pl.format("passage {}", pl.col("row") % 12))
    text = Page(_html(read_record(made_up_run(tmp_path, values, samples, metrics_of())))).text
    for words in (
        "be shown: with 12 groups, a true gain of",
        "on 12 held-out groups",
        "With 12 groups, a true gain of",
    ):
        assert words in text
    assert "held-out, 60 prompts in 12 groups" in text and "intervals are for other groups" in text


@pytest.mark.slow
def test_what_others_wrote_is_text_and_nothing_comes_from_elsewhere(full_html: str, full_page: Page) -> None:
    assert EVIL in full_page.text
    assert EVIL not in full_html
    names = {tag for tag, _ in full_page.tags}
    assert names.isdisjoint({"script", "img", "iframe", "link", "object"})
    assert not [name for _, attributes in full_page.tags for name in attributes if name.startswith("on")]
    assert full_page.references == {MLFLOW}
    assert not re.search(r"@import|url\((?!#)", full_html)


@pytest.mark.slow
def test_what_a_category_is_called_is_drawn_as_it_stands(tmp_path: Path) -> None:
    names = (r"$\frac$", "costs $5 to $10", "_a", "50%", "^{2}", "a\nb", r"\alpha")
    samples = samples_of({"base": outcomes_of(0, 0.4), "trained": outcomes_of(1, 0.6)}, categories=names)
    page = Page(_html(read_record(made_up_run(tmp_path, values_of("named"), samples, []))))
    for name in names:
        assert all(f"· {line}" in page.text for line in name.splitlines()[:1])


@pytest.mark.slow
def test_a_part_without_data_is_left_out(bare: Record, full_page: Page, bare_page: Page) -> None:
    parts = ("champion", "KL to the reference", "held out", "accuracy by category", "Accuracy on held-out")
    assert all(part in full_page.text for part in parts)
    assert not [part for part in parts if part in bare_page.text]
    nothing = Page(_html(replace(bare, metrics=[], result={}, plan={}, data={})))
    titles = ("Training", "The plan and what happened", "Where the time went", "Data")
    assert all(title in bare_page.text for title in titles)
    assert not [title for title in titles if title in nothing.text]


@pytest.mark.slow
def test_the_page_names_code_and_data_and_a_time_only_where_it_was_forecast(bare: Record, bare_page: Page) -> None:
    without_curves = replace(bare, metrics=[])
    data = {
        **bare.data,
        "made": {"train": "738e8676a53217862a9f151273ef9982", "eval": "ca09b3db3e0116802b158ada08c3a573"},
    }
    plan = {**bare.plan, "forecasts": {"time": {"error": "no earlier run"}}}
    text = "".join(Page(_html(replace(without_curves, data=data, plan=plan))).text.split())
    for shown in (
        "Trained with the code of commit bcdcd2a8e0af with uncommitted changes.",
        "train.parquet (validated content 738e8676a532)",
        "time in updates – no forecast 50 s",
    ):
        assert "".join(shown.split()) in text
    page = bare_page.text
    assert "Time forecast, made before the training: a guess." in page
    text = "".join(page.split())  # 50 s of updates, forecast 36; the training's 63 s, forecast 72
    assert "timeinupdates36sforecast50s1.4×theforecast" in text
    assert "timeofthewholetraining1min12sforecast1min03s0.9×theforecast" in text
    time = bare.plan["forecasts"]["time"]
    parts = {"probe": 0.01, **time["parts_hours"], "warm-start": 0.02}
    with_probe = {**bare.plan, "forecasts": {"time": {**time, "parts_hours": parts, "wall_time_hours": 0.05}}}
    rates = {"scored": 40, "never": 12, "always": 3, "mean": 0.4375, "histogram": [12, *[3] * 8, 4]}
    probed = replace(
        without_curves, plan=with_probe, seconds={**bare.seconds, "probe": 18.0, "warm-start": 36.0}, probe=rates
    )
    text = "".join(Page(_html(probed)).text.split())
    assert "of 40 prompts 12 are never solved and 3 always; mean 43.8%".replace(" ", "") in text
    assert "Pass rates of the base" not in page
    assert "timeofthewholetraining1min12sforecast1min03s0.9×theforecast" in text
    assert "timeoftheprobe36sforecast18s0.5×theforecast" in text
    assert "timeofthewarm-start1min12sforecast36s0.5×theforecast" in text


@pytest.mark.slow
def test_the_page_says_that_a_training_sampled_less_far_ahead_and_why(bare: Record, bare_page: Page) -> None:
    rollout = bare.config.rollout.model_copy(update={"max_staleness": 4})
    lowered = replace(
        bare,
        config=bare.config.model_copy(update={"rollout": rollout}),
        result={**bare.result, "max_staleness": 1},
        metrics=[],
        findings=[
            {"step": 9, "rule": "log_ratio", "action": "lower_staleness", "message": "log_ratio/max = 7 is above"}
        ],
    )
    said = "Sampled less far ahead in the end: rollout.max_staleness was lowered from 4 to 1."
    page = Page(_html(lowered)).text
    assert said in page
    assert "Health (lower_staleness): log_ratio/max = 7 is above" in page
    assert "less far ahead" not in bare_page.text


@pytest.mark.slow
def test_prompts_that_changed_are_counted_and_shown(full_page: Page) -> None:
    text = full_page.text
    before, after = outcomes_of(0, 0.4), outcomes_of(2, 0.9)
    assert f"{int((after > before).sum())} better" in text
    assert f"{int((after < before).sum())} worse" in text
    assert f"{int((after + before == 0).sum())} still wrong" in text


@pytest.mark.slow
def test_conversations_are_shown_turn_by_turn_with_calls_answers_rewards_and_failures(tmp_path: Path) -> None:
    right = {"base": outcomes_of(0, 0.4), "trained": outcomes_of(1, 0.9)}
    further = {"conversations/mean_turns": 2.5, "conversations/tool_calls": 1.5, "conversations/failed_tool_calls": 0.5}
    further |= {"conversations/environment_seconds": 0.3, "conversations/failed": 0.1}
    values = values_of("talks", environment={"tools": ["calculator"]})
    samples = with_conversations(samples_of(right, completion=EVIL))
    run = made_up_run(tmp_path, values, samples, metrics_of(**further))
    _write_batches(run, samples, {1: [0.5, math.nan, -1.25], 7: [math.nan] * 3, 9: [-0.75, 2.0, 0.0]})
    page = Page(_html(read_record(run)))
    text = " ".join(page.text.split())
    assert "script" not in {tag for tag, _ in page.tags} and "i" not in {
        tag for tag, attributes in page.tags if not attributes
    }
    shown = [dict(attributes).get("class") or "" for tag, attributes in page.tags if tag == "div"]
    assert shown.count("turn policy") > shown.count("turn environment") > shown.count("turn failed") > 0
    for part in (
        '→ add(first="<b>one</b>", second=',
        "Error: TypeError: unsupported operand <i>str</i>",
        "I add the two numbers.",
        "Begin at 0.",
        "6 environment failed",
        "The environment failed: tool add: its time was up",
        "3 turns, 2 calls, 1 failed call · numeric_match ",
        "what tools and environment said: not trained",
        *(
            f"update {step}: {which} advantage prompt user: held-out {row}+1=reset Begin at {row}. "
            f"in training · advantage {advantage:.3f} · 3 trained of 5 tokens"
            for step, which, row, advantage in [
                (1, "highest", 0, 0.5),
                (1, "lowest", 2, -1.25),
                (9, "highest", 1, 2),
                (9, "lowest", 0, -0.75),
            ]
        ),
    ):
        assert part in text, part
    assert "update 7" not in text
    for chart in ("Tool calls of a conversation", "Turns of a conversation", "Waiting for tools, per conversation"):
        assert chart in text
    rows = {row: text.partition(row)[2][:40] for row in ("failed environments", "turns", "failed calls")}
    assert rows["failed environments"].strip().startswith("10.0%") and "2.5" in rows["turns"]


def _write_batches(run: Path, samples: pl.DataFrame, advantages: Mapping[int, list[float]]) -> None:
    """Generation batches for these updates: the trained policy's first conversations, with these advantages."""
    columns = {name: name.removeprefix("trained/") for name in samples.columns if name.startswith("trained/")}
    said = samples.head(3).select("prompt", *columns).rename(columns)
    (run / "training" / "completions").mkdir(parents=True)
    for step, given in advantages.items():
        trained = pl.Series([[1, 1, 0, 0, 1]] * 3)
        batch = said.with_columns(step=step, advantage=pl.Series(given), trained_tokens=trained)
        batch.write_parquet(run / "training" / "completions" / f"rollout-{step:06d}.parquet")


@pytest.mark.slow
def test_of_several_completions_the_page_shows_pass_at_k_and_how_many_are_right(tmp_path: Path) -> None:
    drawn = [
        samples_of({"base": np.zeros(60), "trained": np.full(60, right)}).with_columns(sample=sample)
        for sample, right in enumerate((0.0, 1.0))
    ]
    keys = {"num_samples": 2, "temperature": 0.7}
    run = made_up_run(tmp_path, values_of("several", evaluation=keys), pl.concat(drawn), [])
    page = Page(_html(read_record(run)))
    for shown in ("pass@k, %", "pass@2", "majority@2", "60 better", "1 of 2 right, the first", "0 of 2 right"):
        assert shown in page.text


@pytest.mark.slow
def test_a_run_whose_rewards_are_grades_is_headlined_by_its_reward(tmp_path: Path) -> None:
    base, gain = outcomes_of(0, 0.5) - 4, 2.5 * outcomes_of(1, 0.6) - 0.5 * outcomes_of(2, 0.5)
    drawn = [
        samples_of({"base": base - sample, "trained": base + gain - sample}, categories=("short", "long")).with_columns(
            sample=sample
        )
        for sample in (0, 1)
    ]
    keys = {"num_samples": 2, "temperature": 0.7}
    values = values_of("graded", evaluation=keys)
    html = _html(read_record(made_up_run(tmp_path, values, pl.concat(drawn), [])))
    text = Page(html).text
    for shown in (
        f"Better than the base by {gain.mean():.3f} in reward (p = ",
        f"{base.mean() - 0.5:.3f} (base) → {(base + gain).mean() - 0.5:.3f} (trained) mean reward on 60 held-out",
        "held-out, reward by category",
        f"{(gain > 0).sum()} better",
        f"{(gain < 0).sum()} worse",
        f"{(gain == 0).sum()} unchanged",
        f"mean of 2: {base[0] - 0.5:.3f}, the first: reward {base[0]:.3f}",
    ):
        assert shown in text
    assert "points" not in text.partition("Sampled temperature")[0]
    assert not [hidden for hidden in ("still wrong", "✗ wrong", "✓ right", "accuracy by category") if hidden in text]
    forest = html[html.index("<figcaption>Reward<small>with 95% intervals") :].partition("</figure>")[0]
    assert "%</text>" not in forest


@pytest.mark.slow
def test_a_set_that_no_reward_scored_is_said_and_not_drawn(tmp_path: Path) -> None:
    nothing = np.full(60, np.nan)
    samples = samples_of({"base": nothing, "trained": nothing}).fill_nan(None)
    page = Page(_html(read_record(made_up_run(tmp_path, values_of("unscored"), samples, []))))
    assert "No comparison with the base: no prompt was scored for both" in page.text
    assert "with 95% intervals" not in page.text


def test_tokens_of_a_pass_are_compared_where_the_plan_has_a_number(full: Record) -> None:
    chosen = {**full.plan, "plan": {**full.plan["plan"], "max_tokens_per_pass": 20_480}}
    result = {**full.result, "tokens_per_pass": 10_240, "ran_out_of_memory": True}
    section = plan_and_outcome(replace(full, plan=chosen, result=result))
    assert ["tokens of a forward pass", "at most 20,480", "at most 10,240", ""] in section.tables[0].rows
    assert any("10,240 tokens per forward pass. Its output says" in note for note in section.notes)
    assert "tokens of a forward pass" not in [row[0] for row in plan_and_outcome(full).tables[0].rows]


def test_the_time_of_a_generation_batch_is_counted_once() -> None:
    plan = make_plan(
        PlanInputs(8, 4, 8, max_completion_length=4, steps_per_generation=2, num_iterations=2, max_steps=8)
    )
    rows = [{"step": step, "step_time": 2.0, "time/generate": 1.0, "time/score": 0.25} for step in range(1, 9)]
    parts = time_of_updates(rows, plan)
    assert parts["sampling"].tolist() == [1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0]
    assert np.allclose(sum(parts.values()), 2.0)


def test_the_time_of_training_and_evaluation_is_split_into_start_and_work(full: Record) -> None:
    record = replace(full, seconds={**full.seconds, "train": 1e6}, evaluation={**full.evaluation, "start_seconds": 4.0})
    times = dict(stage_times(record, 10.0))
    assert (times["evaluate: start"], times["evaluate: sampling, scoring, comparison"]) == (4.0, 6.0)
    in_updates = sum(row["step_time"] for row in record.metrics)
    assert times["train: start, checkpoints, evaluations"] == pytest.approx(1e6 - in_updates)


@pytest.mark.parametrize("count", [1, 30, 5000])
def test_a_chart_is_a_small_well_formed_element_in_the_page_s_colours(count: int) -> None:
    points = [(step, float(step % 7)) for step in range(1, count + 1)]
    element = drawing.svg(lambda axes: drawing.plot(axes, {"reward": points}, [drawing.BLUE]))
    root = ElementTree.fromstring(element)
    assert root.tag == "svg"
    assert "var(--blue)" in element
    assert not re.search(r"#[0-9a-f]{6}\b|http", element)
    assert len(element) < 100_000


def test_the_thick_line_is_the_same_over_the_same_updates_however_long_the_run() -> None:
    values = np.random.default_rng(0).random(1000)
    short, long = (drawing.recent_mean(values[:length], drawing.WINDOW) for length in (60, 1000))
    assert np.array_equal(short, long[:60])
    assert np.allclose(short[: drawing.WINDOW], [values[: n + 1].mean() for n in range(drawing.WINDOW)])
    assert long[500] == pytest.approx(values[501 - drawing.WINDOW : 501].mean())

    def thick(length: int) -> np.ndarray:
        axes = Figure().subplots()
        drawing.plot(axes, {"run": [*enumerate(values[:length], 1)]}, [drawing.BLUE])
        return axes.lines[1].get_ydata()

    assert np.array_equal(thick(60), thick(500)[:60])


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
