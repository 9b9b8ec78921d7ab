"""A finished run run again: what is skipped, what an edit or a champion makes stale, what a failure leaves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from benchmarks.command import python_path
from grpo_core.config.files import load_config
from grpo_core.config.run import RunConfig
from tests.rows import write_lines
from tests.served.conftest import CONFIG, STAGES, TaskStates, accuracy_of, mlflow_run_of, overrides_of, run_pipeline

pytestmark = pytest.mark.slow


@pytest.mark.e2e
def test_running_again_skips_every_stage_and_an_edit_reruns_what_depends_on_it(
    finished: Path, inputs: Path, monkeypatch: pytest.MonkeyPatch, task_states: TaskStates
) -> None:
    parsed: list[dict[str, Any]] = []
    validate = RunConfig.model_validate
    monkeypatch.setattr(RunConfig, "model_validate", lambda values: (parsed.append(values), validate(values))[1])
    trained_at = (finished / "training" / "result.json").stat().st_mtime_ns
    run_pipeline(inputs)
    assert task_states("small") == [(stage, "Skipped") for stage in STAGES]
    parsed.clear()
    run_pipeline(inputs, "evaluation.confidence=0.5")
    assert len(parsed) == 1, "a process validates its configuration once"
    assert task_states("small") == [
        *((stage, "Skipped") for stage in STAGES[:3]),
        ("evaluate", "Completed"),
        ("register", "Completed"),
    ]
    assert (finished / "training" / "result.json").stat().st_mtime_ns == trained_at
    assert list((finished / "replaced").glob("evaluation-*/report.json"))


def test_a_stage_rerun_alone_meets_the_champion_and_the_pipeline_reruns_just_what_depends_on_it(
    finished: Path, inputs: Path, task_states: TaskStates
) -> None:
    from flows.stages import evaluate_run
    from tasks.stages.condition import conditions
    from tasks.stages.run_directory import read_config
    from tasks.tracking.runs import connect

    run_pipeline(inputs)
    evaluate_run("small")
    assert task_states("small-evaluate", 1) == [("evaluate", "Skipped")]
    before = json.loads((finished / "evaluation" / "report.json").read_text())
    assert (before["policies"], before["champion"]) == (["base", "trained"], None)
    version = json.loads((finished / "registration.json").read_text())["version"]
    connect().set_registered_model_alias("arithmetic", "champion", version)
    evaluate_run("small", force=True)
    assert task_states("small-evaluate", 1) == [("evaluate", "Completed")]
    after = json.loads((finished / "evaluation" / "report.json").read_text())
    assert (accuracy_of(after), after["lineage_key"]) == (accuracy_of(before), before["lineage_key"])
    assert after["made"] != before["made"]
    run_id = json.loads((finished / "registration.json").read_text())["mlflow_run_id"]
    assert after["champion"] == {"model_name": "arithmetic", "version": version, "run_id": run_id}
    assert after["sets"]["held-out"]["differences"]["champion"]["reward"]["mean"] == 0, "it is the same model"
    samples = pq.read_table(finished / "evaluation" / "samples.parquet").to_pydict()
    assert samples["champion/completion"] == samples["trained/completion"]
    assert {path.name for path in (finished / "evaluation").iterdir()} == {
        "report.html",
        "report.json",
        "samples.parquet",
    }
    outdated = {
        name: found.reason
        for name, found in conditions(finished, read_config(finished)).items()
        if not found.is_up_to_date
    }
    assert outdated == {"register": "evaluate was made again"}
    run_pipeline(inputs)
    assert task_states("small") == [*((stage, "Skipped") for stage in STAGES[:4]), ("register", "Completed")]
    assert int(json.loads((finished / "registration.json").read_text())["version"]) == int(version) + 1
    assert mlflow_run_of(finished).data.metrics["eval/held-out/champion/accuracy"] == accuracy_of(after)["mean"]


def test_the_real_prompts_and_plan_made_again_come_out_the_same_and_nothing_is_trained_again(
    finished: Path, task_states: TaskStates
) -> None:
    from flows.stages import plan_run, validate_run
    from tasks.stages.condition import conditions
    from tasks.stages.run_directory import read_config

    validate_run("small", force=True)
    plan_run("small", force=True)
    assert task_states("small-plan", 1) == [("plan", "Completed")]
    assert all(found.is_up_to_date for found in conditions(finished, read_config(finished)).values())


def test_a_stage_alone_refuses_to_work_on_what_an_edit_made_stale(
    finished: Path, inputs: Path, task_states: TaskStates
) -> None:
    from flows.stages import evaluate_run
    from tasks.stages.errors import StageError
    from tasks.stages.run_directory import open_run

    with open_run(load_config(CONFIG, overrides_of(inputs, "train.max_steps=5"))):
        pass
    with pytest.raises(
        StageError, match=r"(?s)evaluate of run 'small' .*grpo stage plan --run small.*grpo stage train"
    ):
        evaluate_run("small")
    run_pipeline(inputs)
    assert task_states("small") == [(stage, "Skipped") for stage in STAGES]


def test_a_promotion_is_tried_once_for_each_version(finished: Path, inputs: Path, task_states: TaskStates) -> None:
    run_pipeline(inputs, "promotion.automatic=true")
    skipped = [(stage, "Skipped") for stage in STAGES]
    *before, (task, state) = task_states("small", len(STAGES) + 1)
    assert (before, task, state in ("Promoted", "Refused")) == (skipped, "promote", True)
    run_pipeline(inputs, "promotion.automatic=true")
    assert task_states("small") == skipped


def test_bad_data_fails_validate_with_the_rows_and_trains_nothing(storage: Path, inputs: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    good = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(7)]
    write_lines(bad, [good[0], {"prompt": " ", "answer": None}, *good[1:]])
    with pytest.raises(Exception, match=r"breaks its contract") as error:
        run_pipeline(inputs, "name=bad-data", f"data.train={bad}")
    assert "train row 1, prompt: ' ' breaks blank_prompt" in str(error.value)
    assert "train row 1, answer: None breaks missing_value" in str(error.value)
    assert not (storage / "runs" / "bad-data" / "training").exists()


def test_an_impossible_plan_is_refused_with_fixes(storage: Path, inputs: Path) -> None:
    with pytest.raises(Exception, match=r"not divisible by num_generations=7") as error:
        run_pipeline(inputs, "name=bad-plan", "rollout.num_generations=7")
    assert "num_generations=8" in str(error.value)
    assert not (storage / "runs" / "bad-plan" / "training").exists()


@pytest.mark.e2e
def test_a_reward_that_raises_fails_train_by_name_and_keeps_its_checkpoints(
    storage: Path, inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flows.stages import plan_run, train_run, validate_run

    module = tmp_path / "fragile_rewards.py"
    module.write_text(
        "calls = []\n"
        "def fragile(completions):\n"
        "    calls.append(1)\n"
        "    if len(calls) > 3: raise KeyError('answer sheet')\n"
        "    return [float(len(c)) for c in completions]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", python_path(tmp_path))
    with pytest.raises(Exception, match=r"reward 'fragile' raised KeyError: 'answer sheet'"):
        run_pipeline(inputs, "name=bad-reward", 'rewards=[{function="fragile_rewards:fragile"}]')
    folder = storage / "runs" / "bad-reward"
    assert (folder / "training.partial" / "checkpoints" / "step-000002").is_dir()
    assert not (folder / "training").exists()
    module.write_text("def fragile(completions):\n    return [float(len(c)) for c in completions]\n")
    for stage in (validate_run, plan_run, train_run):
        stage("bad-reward")
    assert json.loads((folder / "training" / "result.json").read_text())["counted"]["updates"] == 4


@pytest.mark.e2e
def test_a_damaged_model_fails_evaluate_and_leaves_the_training_as_it_is(finished: Path, inputs: Path) -> None:
    weights = finished / "training" / "model" / "model.safetensors"
    whole = weights.rename(weights.with_suffix(".whole"))  # it is the registered version's file too
    weights.write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    try:
        with pytest.raises(Exception, match=r"grpo_core.evaluate .* ended with status 1"):
            run_pipeline(inputs, "evaluation.confidence=0.6")
    finally:
        whole.rename(weights)
    findings = finished / "training" / "health.jsonl"
    findings.write_text("no JSON\n")  # nothing reads it but the page of the run, which is no reason to fail
    run_pipeline(inputs, "evaluation.confidence=0.6")
    findings.unlink()
    assert json.loads((finished / "evaluation" / "report.json").read_text())["confidence"] == 0.6
    assert not (finished / "evaluation" / "report.html").exists()


def test_an_unreachable_registry_fails_register_and_a_rerun_does_only_that(
    finished: Path, inputs: Path, monkeypatch: pytest.MonkeyPatch, task_states: TaskStates
) -> None:
    run_pipeline(inputs)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(Exception, match=r"127\.0\.0\.1"):
        run_pipeline(inputs, "registry.alias=second")
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    run_pipeline(inputs, "registry.alias=second")
    assert task_states("small") == [*((stage, "Skipped") for stage in STAGES[:4]), ("register", "Completed")]


def test_the_versions_model_has_the_evaluation_by_data_set_and_what_its_gpus_cost(finished: Path) -> None:
    """Registered again as if the training had run on a GPU."""
    from flows.stages import FLOWS
    from tasks.tracking.runs import connect, dataset_digests

    file, registered = finished / "training" / "mlflow.json", finished / "registration.json"
    known, report = file.read_text(), json.loads((finished / "evaluation" / "report.json").read_text())
    file.write_text(json.dumps({**json.loads(known), "hardware": "NVIDIA L4"}))
    FLOWS["register"]("small", force=True)
    file.write_text(known)
    seconds = json.loads((finished / "training" / "result.json").read_text())["seconds"] + report["seconds"]
    version = connect().get_model_version("arithmetic", json.loads(registered.read_text())["version"])
    model = connect().get_logged_model(version.source.removeprefix("models:/"))
    measured = {it.key: it for it in model.metrics}
    figure = measured["eval/held-out/trained/accuracy"]
    assert (figure.value, figure.step) == (accuracy_of(report)["mean"], 4)
    assert figure.dataset_digest == dataset_digests(finished)["eval"]
    costs = {"cost/gpu_hours": seconds / 3600, "cost/money": 2 * seconds / 3600}
    run_metrics = mlflow_run_of(finished).data.metrics
    for name, value in costs.items():
        assert measured[name].value == run_metrics[name] == pytest.approx(value)
        assert float(version.tags[name.replace("/", ".")]) == pytest.approx(value, rel=1e-5)
    [checkpoint] = [
        it
        for it in connect().search_logged_models([model.experiment_id], f"source_run_id = '{model.source_run_id}'")
        if it.name == "checkpoint-000004"
    ]
    assert {it.key for it in checkpoint.metrics} >= {"eval_reward"}


@pytest.mark.e2e
def test_a_version_that_an_interrupted_register_has_made_is_that_of_the_next_attempt(
    finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flows.stages import FLOWS
    from tasks.tracking.runs import connect

    def versions() -> list[int]:
        return sorted(int(it.version) for it in connect().search_model_versions("name = 'arithmetic'"))

    def registered() -> int:
        return int(json.loads((finished / "registration.json").read_text())["version"])

    def power_cut(*_: Any) -> None:
        raise RuntimeError("power cut")

    before, known = versions(), registered()
    with monkeypatch.context() as patch, pytest.raises(Exception, match="power cut"):
        patch.setattr("mlflow.MlflowClient.set_registered_model_alias", power_cut)  # after the version is made
        FLOWS["register"]("small", force=True)
    made = before[-1] + 1
    assert (versions(), registered()) == ([*before, made], known)
    FLOWS["register"]("small", force=True)
    assert (versions(), registered()) == ([*before, made], made)
    alias = json.loads((finished / "registration.json").read_text())["alias"]
    assert int(connect().get_model_version_by_alias("arithmetic", alias).version) == made
    FLOWS["register"]("small", force=True)
    assert (versions(), registered()) == ([*before, made, made + 1], made + 1)
