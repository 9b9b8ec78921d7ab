"""The champion that an evaluation finds, and what MLflow and people are told of it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from logging import getLogger
from pathlib import Path
from typing import Any

import mlflow
import pytest
from markdown_it import MarkdownIt

from grpo_core.config.files import parse_config
from grpo_core.evaluation.statistics import Difference, Estimate
from tasks.evaluate import _answers_of_another_arm, _escaped, _markdown
from tasks.processes.launch import RETURN_SECONDS, launch_with_restarts
from tasks.processes.run import ProcessError
from tasks.processes.watchdog import HangError
from tasks.registry.champion import present_champion
from tasks.reports.report import rows_of, verdicts
from tasks.stages.run import Context
from tasks.tracking.runs import connect
from tests.conftest import config_values
from tests.hostile import HOSTILE, read, render
from tests.pages import Page


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory, embed_mlflow: Callable[[Path], None]) -> Any:
    storage = tmp_path_factory.mktemp("storage")
    embed_mlflow(storage)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRPO_STORAGE", str(storage))
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        yield connect()


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
    client: mlflow.MlflowClient, tmp_path: Path
) -> None:
    assert present_champion(client, "sums") is None, "no such model"
    client.create_registered_model("sums")
    client.create_model_version("sums", str(tmp_path))
    client.create_model_version("sums", str(tmp_path))
    client.set_registered_model_alias("sums", "candidate", "2")
    assert present_champion(client, "sums") is None, "no such alias"
    client.set_registered_model_alias("sums", "champion", "1")
    assert str(present_champion(client, "sums").version) == "1"


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


def test_an_evaluation_begins_again_if_what_failed_was_not_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = [ProcessError("killed", True), HangError("hang", True), ProcessError("its own", False)]
    patience: list[float] = []

    def fail(*arguments: Any) -> None:
        patience.append(arguments[-1])
        raise errors[len(patience) - 1]

    monkeypatch.setattr("tasks.processes.launch.launch", fail)
    for most, message in ((0, "killed"), (1, "hang"), (5, "its own")):
        patience.clear()
        config = parse_config(config_values(tmp_path, tmp_path, max_restarts=most))
        with pytest.raises(ProcessError, match=message):
            launch_with_restarts(config, ["-m", "work"], getLogger(), tmp_path, {})
        assert patience == [0.0, *[RETURN_SECONDS] * min(most, 2)]


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


@pytest.mark.parametrize("hostile", [*HOSTILE, "    indented"])
def test_samples_are_shown_as_text(hostile: str) -> None:
    assert render(_escaped(hostile)) == (["p"], read(hostile))
    conversation = [{"role": "user", "content": hostile}]
    elements, text = render(_escaped(conversation))
    assert (elements, json.loads(text)[0].keys()) == (["p"], {"role", "content"})
    assert [_escaped(value) for value in (None, 1, 0.5, True)] == [None, 1, 0.5, True]
