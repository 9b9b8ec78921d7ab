"""A logged model in MLflow has the figures of its evaluation by data set, and the prompts that it lost as traces."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any
from unittest import mock

import mlflow
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_core.config.evaluation import EvaluationSet
from grpo_core.config.files import parse_config
from grpo_core.config.inputs import RewardConfig
from grpo_core.config.run import RunConfig
from grpo_core.data.images import FILE
from tasks.rendering.pictures import thumbnail
from tasks.tracking.evaluated import log_checkpoints, log_figures, send_evaluated, standings_of
from tests.made_up import outcomes_of, samples_of, values_of, with_conversations
from tests.vision import picture, png

DATA = {"held-out": ("eval", "0123abcd"), "general": ("eval-general", "4567cdef")}
POLICIES = ["base", "champion", "trained"]


def _config(count: int = 100) -> RunConfig:
    return parse_config(values_of("evaluated", registry={"evaluation_traces": count}))


def _report(sets: list[str], **changes: Any) -> dict[str, Any]:
    return {
        "policies": POLICIES,
        "sets": {name: {} for name in sets},
        "deciding_metric": "accuracy",
        "accuracy_reward": "numeric_match",
        "champion": {"version": "3"},
        **changes,
    }


def _model(client: mlflow.MlflowClient, tracked: dict[str, Any]) -> str:
    return client.create_logged_model(tracked["experiment_id"], "model", tracked["run_id"]).model_id


SCORES = st.lists(st.tuples(*[st.sampled_from([0.0, 1.0, None])] * 3), min_size=1, max_size=8)


@pytest.mark.slow
@given(given=SCORES)
def test_a_prompt_stands_as_its_two_outcomes_compare(given: list[tuple[float | None, ...]]) -> None:
    columns = {policy: np.array([row[place] for row in given], dtype=float) for place, policy in enumerate(POLICIES)}
    samples = samples_of(columns).with_columns(pl.col(pl.Float64).fill_nan(None))
    # Accuracy counts an answer that was not scored as none.
    found = standings_of(samples, "held-out", _report(["held-out"]), _config())
    for place, (base, champion, trained) in enumerate(given):
        for other, theirs in {"base": base, "champion": champion}.items():
            if trained is None or theirs is None:
                expected = "not scored"
            else:
                expected = "same" if trained == theirs else "better" if trained > theirs else "worse"
            assert found[other][place] == expected


@pytest.mark.slow
def test_from_a_model_one_finds_the_prompts_that_it_lost(
    mlflow_client: mlflow.MlflowClient, tracked: dict[str, Any], tmp_path: Path
) -> None:
    right = {
        policy: outcomes_of(seed, rate)
        for seed, (policy, rate) in enumerate(zip(POLICIES, (0.4, 0.6, 0.7), strict=True))
    }
    general = samples_of({policy: 1 - values for policy, values in right.items()}, "general")
    file = tmp_path / "samples.parquet"
    pl.concat([samples_of(right, categories=("short", "long")), general], how="diagonal").write_parquet(file)
    model = _model(mlflow_client, tracked)

    def send() -> dict[str, dict[str, int]]:
        return send_evaluated(file, _report(["held-out", "general"]), _config(20), tracked, model, "4")

    lost = {other: int((right["trained"] < right[other]).sum()) for other in ("base", "champion")}
    counts = send()
    assert {other: counts[other]["worse"] for other in lost} == lost
    assert sum(counts["base"].values()) == 60
    assert send() == counts

    def search(filter: str = "") -> list[Any]:
        of_model = f"request_metadata.`mlflow.modelId` = '{model}'"
        return mlflow.search_traces(
            locations=[tracked["experiment_id"]],
            filter_string=f"{of_model} AND {filter}" if filter else of_model,
            max_results=500,
            return_type="list",
        )

    assert len(search()) == 2 * 20, "sent twice, there once"
    newest_first = [{trace.info.tags[f"vs_{other}"] for other in lost} for trace in search("tags.`set` = 'held-out'")]
    is_lost = ["worse" in standings for standings in newest_first]
    assert is_lost == sorted(is_lost, reverse=True), "MLflow's table begins with what was lost"
    for other, count in lost.items():
        found = search(f"tags.vs_{other} = 'worse' AND tags.`set` = 'held-out'")
        assert len(found) == count, "all that it lost, however few are traced"
    tags = found[0].info.tags
    row = int(tags["row"])
    assert (tags["version"], tags["champion"], tags["category"]) == ("4", "3", ("short", "long")[row % 2])
    spans = {span.name: span.outputs["messages"][0]["content"] for span in found[0].data.spans}
    assert spans == {
        f"held-out, prompt {row}": "trained 7",
        "the base answered": "base 7",
        "the champion answered": "champion 7",
    }
    assessed = {it.name: it.value for it in found[0].info.assessments}
    assert assessed == {"numeric_match": right["trained"][row], "answer": str(row + 1)}
    assert found[0].info.trace_metadata["mlflow.sourceRun"] == tracked["run_id"]


@pytest.mark.slow
def test_evaluated_conversations_are_traced_turn_by_turn(
    mlflow_client: mlflow.MlflowClient, tracked: dict[str, Any], tmp_path: Path
) -> None:
    right = {policy: outcomes_of(seed, 0.5) for seed, policy in enumerate(("base", "trained"))}
    file = tmp_path / "samples.parquet"
    with_conversations(samples_of(right)).write_parquet(file)
    report = _report(["held-out"], policies=["base", "trained"], champion=None)
    counts = send_evaluated(file, report, _config(), tracked, _model(mlflow_client, tracked), "1")
    assert counts["base"]["not scored"] == 6, "every tenth lost its environment"
    found = mlflow.search_traces(
        locations=[tracked["experiment_id"]], filter_string="tags.row = '2'", return_type="list"
    )
    names = [span.name for span in found[0].data.spans]
    assert names == ["held-out, prompt 2", "policy", "add", "policy", "add", "policy", "the base answered"]
    assert "vs_champion" not in found[0].info.tags


def _figures(mean: float) -> dict[str, float]:
    return {"mean": mean, "low": mean - 0.125, "high": mean + 0.125, "p_value": 0.25}


@pytest.mark.slow
def test_mlflow_takes_the_figures_of_the_longest_names(
    mlflow_client: mlflow.MlflowClient, tracked: dict[str, Any]
) -> None:
    name, reward = EvaluationSet(name="s" * 100, data="d").name, RewardConfig(function="length", name="r" * 100).name
    figures = {key: _figures(0.5) for key in ("accuracy", "reward", f"rewards/{reward}/mean")}
    found = {"policies": dict.fromkeys(POLICIES, figures), "differences": {"base": figures, "champion": figures}}
    data = {name: (f"eval-{name}", "01234567")}
    log_figures(mlflow_client, tracked["run_id"], _model(mlflow_client, tracked), {"sets": {name: found}}, data, 1)
    logged = mlflow_client.get_run(tracked["run_id"]).data.metrics
    assert f"eval/{name}/difference/champion/rewards/{reward}/mean/p_value" in logged


@pytest.mark.slow
def test_a_models_figures_have_their_data_set_and_those_of_others_are_the_runs_alone(
    mlflow_client: mlflow.MlflowClient, tracked: dict[str, Any]
) -> None:
    names = ["held-out", *(f"set-{number}" for number in range(40))]  # more figures than one request may have
    metrics = ("accuracy", "reward", "pass@4")
    of_policy = {name: _figures(0.5) for name in metrics}
    found = {
        "policies": {"base": of_policy, "trained": {**of_policy, "accuracy": _figures(0.75), "kl": _figures(math.nan)}},
        "differences": {"base": {name: _figures(0.25) for name in metrics}},
    }
    model = _model(mlflow_client, tracked)
    data = {name: (f"eval-{name}", f"{place:08x}") for place, name in enumerate(names)}
    for _ in range(2):
        log_figures(mlflow_client, tracked["run_id"], model, {"sets": dict.fromkeys(names, found)}, data, 12)
    logged = mlflow_client.get_run(tracked["run_id"]).data.metrics
    assert len(logged) == 41 * (3 + 3 + 4 + 3 * 4), "all but the KL that is not a number"
    assert logged["eval/set-7/trained/pass_at_4"] == 0.5
    assert "reward" not in logged, "which is the training's"
    own = {it.key: it for it in mlflow_client.get_logged_model(model).metrics}
    assert not [key for key in own if "/base/" in key and "difference" not in key]
    accuracy = own["eval/set-7/trained/accuracy"]
    assert (accuracy.value, accuracy.dataset_name, accuracy.dataset_digest, accuracy.step) == (
        *(0.75, "eval-set-7", "00000008"),
        12,
    )
    assert own["eval/held-out/trained/accuracy/low"].value == 0.625
    assert own["eval/held-out/difference/base/accuracy/high"].value == 0.375


@pytest.mark.slow
def test_each_evaluated_update_has_one_logged_model_also_if_its_process_was_killed(
    mlflow_client: mlflow.MlflowClient, tracked: dict[str, Any]
) -> None:
    rows: list[dict[str, Any]] = [{"step": n, "reward": 0.5, "timestamp": 1000.0 + n} for n in range(1, 7)]
    for row in rows[1::2]:
        row["eval_accuracy"] = row["step"] / 8
    arguments = (tracked["experiment_id"], tracked["run_id"], rows, DATA["held-out"])
    for request in ("finalize_logged_model", "log_outputs", "log_batch"):
        with mock.patch.object(mlflow_client, request, side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            log_checkpoints(mlflow_client, *arguments)
    for _ in range(2):
        log_checkpoints(mlflow_client, *arguments)
    found = {it.name: it for it in mlflow_client.search_logged_models([tracked["experiment_id"]])}
    assert sorted(found) == ["checkpoint-000002", "checkpoint-000004", "checkpoint-000006"]
    [metric] = found["checkpoint-000004"].metrics
    assert (metric.key, metric.value, metric.step, metric.dataset_digest) == ("eval_accuracy", 0.5, 4, "0123abcd")
    assert found["checkpoint-000004"].tags["weights"].startswith("not kept")
    outputs = mlflow_client.get_run(tracked["run_id"]).outputs.model_outputs
    assert sorted((it.model_id, it.step) for it in outputs) == sorted(
        (it.model_id, int(it.tags["step"])) for it in found.values()
    )
    assert json.loads(json.dumps(mlflow_client.get_run(tracked["run_id"]).data.metrics)) == {"eval_accuracy": 0.75}


def test_an_evaluated_answer_has_the_thumbnails_of_its_prompt(tmp_path: Path) -> None:
    rows = [{"image": png(picture(width)), "height": 20, "width": width, "tokens": 1, "grid": None} for width in (8, 9)]
    for folder in ("dataset", "evaluation"):
        (tmp_path / folder).mkdir()
    pq.write_table(pa.Table.from_pylist(rows, FILE), tmp_path / "dataset" / "images.parquet")
    samples = samples_of({policy: outcomes_of(seed, 0.5) for seed, policy in enumerate(POLICIES)})
    own = [[], [1], [0, 1]] * (samples.height // 3)
    path = tmp_path / "evaluation" / "samples.parquet"
    samples.with_columns(images=pl.Series(own, dtype=pl.List(pl.Int64))).write_parquet(path)
    tracked = {"run_id": "run", "experiment_id": "0"}
    with mock.patch("tasks.tracking.evaluated.send") as send:
        send_evaluated(path, _report(["held-out"]), _config(), tracked, "model", "1")
    made = [thumbnail(picture(width)) for width in (8, 9)]
    (told, _), _ = send.call_args
    assert {it.tags["row"]: it.images for it in told} == {
        row: [made[number] for number in numbers] for row, numbers in enumerate(own)
    }
