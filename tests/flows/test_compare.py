"""`grpo compare`: what differs is found, pairs are those of the outcomes, and what cannot be paired says why."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from typer.testing import CliRunner, Result

from flows.cli.main import app
from grpo_core.config.files import parse_config
from grpo_core.evaluation.statistics import paired_difference
from tasks.reports.compare import comparison_page, paired_with_first, parameters_that_differ
from tasks.reports.record import NotEvaluatedError, Record, load_record, read_record
from tasks.stages.run_directory import UnknownRunError
from tests.made_up import made_up_run, metrics_of, outcomes_of, samples_of, values_of, with_conversations
from tests.pages import Page

SLOWER = {"train": {"learning_rate": 2e-6}, "algorithm": {"beta": 0.04}}


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs evaluated alike, one of other evaluation settings, one on other prompts, one without an evaluation."""
    root = tmp_path_factory.mktemp("storage")
    base = {"base": outcomes_of(0, 0.3)}
    first, slower = (samples_of({**base, "trained": outcomes_of(seed, rate)}) for seed, rate in ((1, 0.5), (2, 0.9)))
    runs: dict[str, tuple[dict[str, Any], pl.DataFrame, str]] = {
        "first": ({}, first, "same"),
        "slower": (SLOWER, slower, "same"),
        "warm": ({"evaluation": {"temperature": 0.7}}, first, "warm"),
        "asked": ({}, first.with_columns(prompt=pl.lit("other")), "asked"),
        "unfinished": ({}, first, "same"),
        "refused": ({}, first, "same"),
    }
    for name, (changes, samples, key) in runs.items():
        metrics = metrics_of(**({"kl": 0.02} if name == "slower" else {}))
        made_up_run(root / "runs" / name, values_of(name, **changes), samples, metrics, key)
    (root / "runs" / "unfinished" / "evaluation" / "report.json").unlink()
    for path in ("dataset", "training", "evaluation"):
        shutil.rmtree(root / "runs" / "refused" / path)
    (root / "runs" / "refused" / "plan.json").unlink()
    return root


@pytest.fixture(autouse=True)
def _here(storage: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRPO_STORAGE", str(storage))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("COLUMNS", "80")


def _records(*names: str) -> dict[str, Record]:
    return {name: load_record(name) for name in names}


def _compare(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["compare", *arguments])


@pytest.mark.slow
def test_the_parameters_that_differ_are_exactly_those() -> None:
    assert parameters_that_differ(it.config for it in _records("first", "slower").values()) == {
        "train.learning_rate": ["1e-06", "2e-06"],
        "algorithm.beta": ["0.0", "0.04"],
    }
    assert parameters_that_differ(it.config for it in _records("first", "asked").values()) == {}


def test_the_paired_figures_are_those_of_the_outcomes() -> None:
    (paired,) = paired_with_first(_records("first", "slower"), "held-out").values()
    expected = paired_difference(outcomes_of(1, 0.5), outcomes_of(2, 0.9), 0.95, (0.0, 1.0))
    assert paired.differences["accuracy"] == asdict(expected)
    assert not paired.obstacle


@pytest.mark.slow
@pytest.mark.parametrize("grouped", ["first", "slower"])
def test_prompts_are_paired_by_groups_if_one_of_two_runs_has_them(grouped: str) -> None:
    """The other one was evaluated before evaluation.group_column was set."""
    records = _records("first", "slower")
    groups = pl.Series("group", [f"{row % 12}" for row in range(60)])
    records[grouped] = replace(records[grouped], samples=records[grouped].samples.with_columns(groups))
    (paired,) = paired_with_first(records, "held-out").values()
    means = (outcomes_of(seed, rate).reshape(5, 12).mean(axis=0) for seed, rate in ((1, 0.5), (2, 0.9)))
    assert paired.differences["accuracy"] == asdict(paired_difference(*means, 0.95, (0.0, 1.0)))
    page = Page(comparison_page(records)).text
    assert "Group by group against first" in page and "on the same 12 groups" in page


def test_the_other_order_changes_the_sign_and_nothing_else() -> None:
    forth, back = (
        paired_with_first(_records(*names), "held-out")[names[1]].differences["accuracy"]
        for names in (("first", "slower"), ("slower", "first"))
    )
    assert forth["mean"] == -back["mean"]
    assert forth["minimum_detectable"] == back["minimum_detectable"]
    assert forth["probability_better"] == pytest.approx(1 - back["probability_better"], abs=0.01)


def test_evaluations_that_differ_are_not_paired_and_it_says_in_what() -> None:
    paired = paired_with_first(_records("first", "warm", "asked"), "held-out")
    assert paired["warm"].obstacle == "evaluated differently: evaluation.temperature (0.0 / 0.7)"
    assert paired["asked"].obstacle == "other prompts in held-out"
    assert not paired["warm"].differences


def test_of_rewards_that_weigh_differently_all_is_paired_but_their_sum() -> None:
    """The weights are no part of what a policy's answers were given."""
    weights = {"rewards": [{"function": "numeric_match", "weight": 2.0}]}
    weighted = replace(load_record("slower"), config=parse_config({**values_of("weighted"), **weights}))
    records = {**_records("first"), "weighted": weighted}
    (paired,) = paired_with_first(records, "held-out").values()
    assert paired.differences.keys() == {"accuracy"}
    assert paired.differences["accuracy"] == asdict(
        paired_difference(outcomes_of(1, 0.5), outcomes_of(2, 0.9), 0.95, (0.0, 1.0))
    )
    page = Page(comparison_page(records)).text
    assert "cannot be compared" not in page
    assert (
        "The reward of weighted cannot be paired with first: rewards weigh differently: rewards.0.weight (1.0 / 2.0)"
        in page
    )
    by_reward = {"promotion": {"metric": "reward"}}
    first = records["first"]
    records["first"] = replace(first, config=parse_config({**values_of("first"), **by_reward}))
    assert "weighted cannot be compared with first" in Page(comparison_page(records)).text


@pytest.mark.slow
def test_the_terminal_has_it_in_80_columns_and_the_page_the_same_figures(storage: Path) -> None:
    file = storage / "comparison.html"
    done = _compare("first", "slower", "warm", "--html", str(file))
    assert done.exit_code == 0, done.output
    assert max(map(len, done.output.splitlines()[:-1])) <= 80
    page = Page(file.read_text())
    difference = paired_with_first(_records("first", "slower"), "held-out")["slower"].differences["accuracy"]
    evaluated = load_record("slower").evaluation["sets"]["held-out"]["policies"]["trained"]["accuracy"]
    for figure in (
        f"{100 * difference['mean']:+.1f} points",
        f"[{100 * difference['low']:.1f}, {100 * difference['high']:.1f}]",
        f"{evaluated['mean']:.1%}",
        "train.learning_rate",
        "evaluation.temperature",
    ):
        assert figure in done.output
        assert figure in page.text
    assert page.references == set()
    assert "script" not in {tag for tag, _ in page.tags}


@pytest.mark.slow
def test_runs_are_judged_by_what_the_first_is_to_gain_in() -> None:
    records = {name: replace(record, metrics=[]) for name, record in _records("first", "slower").items()}
    in_points = Page(comparison_page(records)).text
    config = parse_config(values_of("first", promotion={"metric": "reward"}))
    in_reward = Page(comparison_page({**records, "first": replace(records["first"], config=config)})).text
    mean = paired_with_first(records, "held-out")["slower"].differences["reward"]["mean"]
    assert f"slower: better than the run first by {100 * mean:.1f} points (p = " in in_points
    assert f"slower: better than the run first by {mean:.3f} in reward (p = " in in_reward
    assert "accuracy of the base" in in_points
    assert "reward of the base" in in_reward


@pytest.mark.slow
def test_a_curve_is_drawn_for_what_any_of_the_runs_has() -> None:
    text = Page(comparison_page(_records("first", "slower"))).text
    assert "KL to the reference" in text
    assert "Reward on held-out prompts" not in text


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        (["first", "slowr"], "no run 'slowr'"),
        (["first", "slowr"], "the nearest there: slower"),
        (["first", "unfinished"], "grpo stage evaluate --run unfinished"),
        (["first", "refused"], "its validate, plan, train have not been done"),
        (["first"], "from two to 6 runs"),
        (["first", "first"], "each once"),
    ],
)
def test_what_cannot_be_compared_is_refused_with_the_reason(runs: list[str], message: str) -> None:
    done = _compare(*runs)
    assert done.exit_code == 2
    assert message in " ".join(done.output.split())


@pytest.mark.slow
def test_a_run_of_another_machine_is_read_from_mlflow(
    storage: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, embed_mlflow: Callable[[Path], None]
) -> None:
    from tasks.tracking.runs import connect

    embed_mlflow(tmp_path)
    here = read_record(storage / "runs" / "slower")
    folder = storage / "runs" / "slower"
    monkeypatch.setenv("GRPO_STORAGE", str(tmp_path))
    client = connect()
    experiment = client.create_experiment("grpo", (tmp_path / "artifacts").as_uri())
    run_id = client.create_run(experiment).info.run_id
    for path in ("config.toml", "plan.json", "training/result.json", "training/metrics.jsonl"):
        client.log_artifact(run_id, str(folder / path))
    client.log_artifacts(run_id, str(folder / "evaluation"), "evaluation")
    client.log_artifact(run_id, str(folder / "dataset" / "report.json"), "dataset")
    client.create_registered_model("sums")
    version = client.create_model_version("sums", (tmp_path / "artifacts").as_uri(), run_id)
    client.set_registered_model_alias("sums", "candidate", version.version)
    for reference in (run_id, "sums@candidate", "sums/1"):
        there = load_record(reference)
        assert there.samples.equals(here.samples)
        assert (there.config, there.evaluation, there.metrics) == (here.config, here.evaluation, here.metrics)
        assert (there.plan, there.result, there.data) == (here.plan, here.result, here.data)
    own = tmp_path / "own"
    shutil.copytree(folder / "evaluation", own / "evaluation")
    shutil.copy(folder / "config.toml", own)
    (own / "evaluation" / "report.json").write_text(json.dumps({**here.evaluation, "key": "its own"}))
    client.log_artifacts(run_id, str(own), "registered/own")
    client.create_model_version("sums", (tmp_path / "artifacts").as_uri(), run_id, {"record": "registered/own"})
    there = load_record("sums/2")
    assert there.evaluation == {**here.evaluation, "key": "its own"}
    assert (there.config, there.metrics, there.plan) == (here.config, here.metrics, here.plan)
    empty = client.create_run(experiment).info.run_id
    with pytest.raises(NotEvaluatedError, match="has no evaluation"):
        load_record(empty)
    with pytest.raises(UnknownRunError, match="nor does MLflow have such"):
        load_record("sums@champion")


@pytest.mark.slow
def test_runs_on_an_environment_are_compared_with_their_turns_calls_and_failures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRPO_STORAGE", str(tmp_path))
    for seed, name in enumerate(("one", "two"), start=1):
        samples = with_conversations(samples_of({"base": outcomes_of(0, 0.3), "trained": outcomes_of(seed, 0.5)}))
        values = values_of(name, environment={"tools": ["calculator"]})
        figures = metrics_of(**{"conversations/mean_turns": 2.5})
        made_up_run(tmp_path / "runs" / name, values, samples, figures)
    shown = _compare("one", "two")
    assert shown.exit_code == 0, shown.output
    for row in ("turns", "tool calls", "failed calls", "failed environments", "turns of a conversation"):
        assert f"\n {row}" in shown.output.replace("│", " ").replace("\n  ", "\n "), shown.output
    assert "turns of a conversation" in comparison_page(_records("one", "two"))
