"""The champion that an evaluation finds, what MLflow and people are told of it, and when register registers again."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlflow
import pytest
from markdown_it import MarkdownIt

from grpo_core.config.files import parse_config
from grpo_core.evaluation.statistics import Difference, Estimate
from tasks import register
from tasks.evaluate import _answers_of_another_arm, _markdown
from tasks.register import result_line
from tasks.registry.champion import present_champion
from tasks.reports.report import rows_of, verdicts
from tasks.stages.run import Context
from tasks.stages.table import REGISTER
from tasks.tracking.runs import connect
from tests.conftest import config_values
from tests.pages import Page


def test_a_forced_evaluation_takes_no_answers_from_another_arm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRPO_STORAGE", str(tmp_path))
    evaluation = tmp_path / "runs" / "sums.lr.a" / "evaluation"
    evaluation.mkdir(parents=True)
    (evaluation.parent / "config.toml").touch()
    (evaluation / "report.json").write_text('{"base_answers": "their key"}')
    (evaluation / "samples.parquet").touch()
    values = {**config_values(tmp_path, tmp_path), "name": "sums.lr.b", "registry": {"sweep": "sums.lr"}}
    config, run = parse_config(values), tmp_path / "runs" / "sums.lr.b"
    for force, found in ((False, (evaluation / "samples.parquet", ["base"])), (True, (None, []))):
        assert _answers_of_another_arm(Context(config, run, run, force), "their key", None) == found


@pytest.mark.slow
def test_the_champion_is_the_version_that_has_the_alias_whoever_set_it(
    mlflow_client: mlflow.MlflowClient, tmp_path: Path
) -> None:
    assert present_champion(mlflow_client, "sums") is None, "no such model"
    mlflow_client.create_registered_model("sums")
    mlflow_client.create_model_version("sums", str(tmp_path))
    mlflow_client.create_model_version("sums", str(tmp_path))
    mlflow_client.set_registered_model_alias("sums", "candidate", "2")
    assert present_champion(mlflow_client, "sums") is None, "no such alias"
    mlflow_client.set_registered_model_alias("sums", "champion", "1")
    assert str(present_champion(mlflow_client, "sums").version) == "1"


def test_a_registry_that_does_not_answer_is_not_one_without_a_champion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(Exception, match=r"127\.0\.0\.1"):
        present_champion(mlflow.MlflowClient("http://127.0.0.1:1"), "sums")


@pytest.mark.parametrize(
    ("sharding", "launch", "expected"),
    [
        ("none", {}, (1, 1)),
        ("hybrid", {}, (4, 1)),
        ("none", {"launcher": "ssh", "hosts": ["a", "b"]}, (1, 1)),
        ("hybrid", {"launcher": "ssh", "hosts": ["a", "b"]}, (4, 2)),
    ],
)
def test_an_evaluation_runs_where_the_training_ran(
    tmp_path: Path, sharding: str, launch: dict[str, Any], expected: tuple[int, int]
) -> None:
    machines = 2 if launch else 1
    values = config_values(tmp_path, tmp_path, sharding=sharding, num_processes=4, num_machines=machines)
    train = parse_config(values | {"launch": launch}).where_evaluated.train
    assert (train.num_processes, train.num_machines) == expected


def _report(names: list[str], categories: list[str] = ()) -> dict[str, Any]:
    def estimate(mean: float) -> dict[str, float]:
        return vars(Estimate(mean, mean - 0.1, mean + 0.1, 40))

    def difference(p: float, mean: float = 0.25) -> dict[str, float]:
        return vars(Difference(mean, 0.125, 0.375, p, 0.99, 0.09, 0.95, 40))

    metrics = ("accuracy", "reward", "pass@4")
    figures = {
        "num_prompts": 40,
        "policies": {
            "base": {name: estimate(0.5) for name in metrics},
            "champion": {**{name: estimate(0.6) for name in metrics}, "kl": estimate(0.25)},
            "trained": {**{name: estimate(0.75) for name in metrics}, "kl": estimate(math.nan)},
        },
        "differences": {
            "base": {name: difference(0.001) for name in (*metrics, "kl")},
            "champion": {name: difference(0.3) for name in (*metrics, "kl")},
        },
    }
    figures["policies"]["base"]["reward"] = estimate(-2.5)
    figures["differences"]["base"]["reward"] = difference(0.002, 3.25)
    of_category = {category: {**figures, "num_prompts": 7} for category in categories}
    return {"sets": {name: {**figures, "categories": of_category} for name in names}}


def test_people_are_told_figures_and_verdict_in_one_table_a_set() -> None:
    report = _report(["held-out", "hard"], ["odd|even"])
    assert verdicts(report, "accuracy")[:2] == [
        "held-out: better than the base by 25.0 points (p = 0.001)",
        "held-out: likely better than the champion by 25.0 points, which is not shown yet: the interval is "
        "[12.5, 37.5]; with 40 prompts, a true gain of 9.0 points or more is detected 80% of the time",
    ]
    head, accuracy, *_, kl = rows_of(report["sets"]["hard"])
    assert head == ["", "base", "champion", "trained", "trained − base [95%]", "trained − champion [95%]"]
    assert accuracy[:5] == ["accuracy", "50.0%", "60.0%", "75.0%", "+25.0 points [12.5, 37.5]"]
    assert kl[:3] == ["kl", "", "0.250"]
    page = Page(MarkdownIt("commonmark").enable("table").render(_markdown(report, "accuracy")))
    tags = [tag for tag, _ in page.tags]
    assert (tags.count("h2"), tags.count("table")) == (2, 6)
    assert "odd|even\n7\n50.0%\n" in page.text


def test_of_a_run_that_is_to_gain_in_reward_people_are_told_the_reward() -> None:
    report = _report(["held-out"], ["even"])
    better, open_ = verdicts(report, "reward")
    assert better == "held-out: better than the base by 3.250 in reward (p = 0.002)"
    assert "likely better than the champion by 0.250 in reward, which is not shown yet" in open_
    page = Page(MarkdownIt("commonmark").enable("table").render(_markdown(report, "reward"))).text
    assert page.startswith(f"Evaluation{better}.")
    assert "category\nprompts\nreward, base\n" in page
    assert "even\n7\n-2.500\n" in page


def _one_figure(metric: str, mean: float, gain: float) -> dict[str, Any]:
    def found(value: float) -> dict[str, float]:
        return {"mean": value, "low": value - 0.04, "high": value + 0.04}

    return {
        "sets": {
            "held-out": {"policies": {"trained": {metric: found(mean)}}, "differences": {"base": {metric: found(gain)}}}
        }
    }


def test_a_runs_result_is_its_figure_and_its_gain_with_their_intervals() -> None:
    line = result_line(_one_figure("accuracy", 0.796, 0.36), "accuracy")
    assert line == "accuracy 79.6% [75.6, 83.6], +36.0 points [32.0, 40.0]"
    line = result_line(_one_figure("reward", 1.5, -0.25), "reward")
    assert line == "reward 1.500 [1.460, 1.540], -0.250 [-0.290, -0.210]"


@pytest.mark.slow
def test_a_version_that_was_deleted_in_mlflow_is_registered_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, embed_mlflow: Callable[[Path], None]
) -> None:
    monkeypatch.setenv("GRPO_STORAGE", str(tmp_path))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr(register, "get_run_logger", logging.getLogger)
    embed_mlflow(tmp_path)
    assert not register._is_deleted(tmp_path), "nothing is registered yet"
    client = connect()
    client.create_registered_model("sums")
    version = client.create_model_version("sums", str(tmp_path)).version
    REGISTER.path(tmp_path).write_text(json.dumps({"model_name": "sums", "version": version, "lineage_key": "1"}))
    assert not register._is_deleted(tmp_path)
    client.delete_model_version("sums", version)
    assert register._is_deleted(tmp_path)
    (tmp_path / "mlflow" / "mlflow.db").write_bytes(b"damaged" * 1000)
    assert not register._is_deleted(tmp_path), "MLflow does not say"
