"""The quickstart in small, every stage for real: triggered by Prefect's API, a training process, MLflow on SQLite."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from benchmarks.command import python_path
from grpo_core.config.base import flatten
from grpo_core.config.files import load_config
from grpo_core.config.run import RunConfig
from grpo_core.system.tables import read_parquet
from tasks.rendering import figures
from tests.conftest import small_quickstart
from tests.rows import write_lines
from tests.served.conftest import STAGES, TaskStates
from tests.serving import Served

CONFIG = Path(__file__).parents[2] / "configs" / "quickstart.toml"

pytestmark = pytest.mark.slow


def _overrides(inputs: Path, *overrides: str) -> list[str]:
    """Those of the fixture `changes`, and further ones."""
    train = {"max_steps": 4, "save_steps": 2, "eval_steps": 4}
    changes = flatten(small_quickstart("small", inputs, train, launch={"gpu_hour_price": 2.0}))
    return [*(f"{key}={value}" for key, value in changes.items()), *overrides]


def _run(inputs: Path, *overrides: str) -> Path:
    from flows.parameters.form import changes_from_overrides
    from flows.pipeline import pipeline

    return pipeline("quickstart", changes_from_overrides(CONFIG, _overrides(inputs, *overrides)))


@pytest.fixture(scope="module")
def triggered(served: Served, changes: dict[str, Any]) -> dict[str, Any]:
    """Prefect's flow run of the whole pipeline, as the form starts it."""
    return served.wait(served.trigger("pipeline/local", preset="quickstart", changes=changes))


@pytest.fixture(scope="module")
def finished(triggered: dict[str, Any], storage: Path) -> Path:
    """Its run directory. What tests run again in their own process has the same configuration, given as by `--set`."""
    return storage / "runs" / triggered["name"]


def _mlflow_run(finished: Path) -> Any:
    from tasks.tracking.runs import connect

    return connect().get_run(json.loads((finished / "registration.json").read_text())["mlflow_run_id"])


def _accuracy(report: dict[str, Any]) -> dict[str, float]:
    return report["sets"]["held-out"]["policies"]["trained"]["accuracy"]


def test_a_run_triggered_by_the_api_completes_every_stage_in_order(triggered: dict[str, Any], served: Served) -> None:
    run = triggered
    assert (run["state_type"], run["name"]) == ("COMPLETED", "small"), served.messages(run["id"])
    assert "grpo" in run["tags"]
    assert served.tasks(run["id"], 5) == [(stage, "Completed") for stage in STAGES]


def test_the_final_message_of_a_run_is_its_verdict_and_prefect_and_mlflow_link_each_other(
    triggered: dict[str, Any], finished: Path, served: Served
) -> None:
    from tasks.reports.report import headline
    from tasks.tracking.runs import run_address

    verdict = headline(json.loads((finished / "evaluation" / "report.json").read_text()), "accuracy").headline
    version = json.loads((finished / "registration.json").read_text())["version"]
    assert triggered["state"]["message"] == f"{verdict}; arithmetic version {version} registered"
    address = f"{served.mlflow_url}/#{run_address(finished / 'training').partition('#')[2]}"
    assert f"MLflow run: {address}" in served.messages_with(triggered["id"], "MLflow run:")
    shown = {it["key"]: it for it in served.filter("artifacts", flow_runs={"id": {"any_": [triggered["id"]]}})}
    assert address in shown["training-live"]["description"] and address in shown["evaluation"]["data"]
    tags = _mlflow_run(finished).data.tags
    assert tags["prefect.flow_run"] == triggered["id"]
    assert f"({served.prefect_url}/runs/flow-run/{triggered['id']})" in tags["mlflow.note.content"]


def test_the_run_directory_holds_what_each_stage_promises(finished: Path) -> None:
    for path in [
        "config.toml",
        "dataset/train.parquet",
        "dataset/eval.parquet",
        "dataset/report.json",
        "plan.json",
        "training/metrics.jsonl",
        "training/completions/rollout-000000.parquet",
        "training/result.json",
        "training/model/config.json",
        "evaluation/report.json",
        "evaluation/report.html",
        "evaluation/samples.parquet",
        "registration.json",
    ]:
        assert (finished / path).is_file(), path
    assert not list(finished.glob("*.partial"))


def test_the_training_did_what_the_plan_said(finished: Path) -> None:
    plan = json.loads((finished / "plan.json").read_text())["plan"]
    result = json.loads((finished / "training" / "result.json").read_text())
    assert plan["max_steps"] == 4
    assert result["counted"] == result["planned"]
    for name in ("rollouts", "prompts_seen", "prompts_dropped", "completions"):
        assert result["counted"][name] == plan[name]


def test_every_held_out_prompt_is_evaluated_once_by_both_policies(finished: Path, inputs: Path) -> None:
    samples = pq.read_table(finished / "evaluation" / "samples.parquet").to_pydict()
    assert set(samples["set"]) == {"held-out"}
    assert samples["prompt"] == pq.read_table(inputs / "eval.parquet").column("prompt").to_pylist()
    assert all(isinstance(text, str) for policy in ("base", "trained") for text in samples[f"{policy}/completion"])


def test_mlflow_has_the_configuration_the_plan_live_metrics_and_the_evaluation(finished: Path) -> None:
    from tasks.tracking.runs import connect

    run = _mlflow_run(finished)
    report = json.loads((finished / "evaluation" / "report.json").read_text())
    steps = [json.loads(line) for line in (finished / "training" / "metrics.jsonl").read_text().splitlines()]
    assert run.info.status == "FINISHED"
    assert run.data.params["train.learning_rate"] == str(load_config(CONFIG).train.learning_rate)
    assert run.data.params["plan.max_steps"] == "4"
    assert run.data.metrics["eval/held-out/trained/accuracy"] == _accuracy(report)["mean"]
    lineage = Path(connect().download_artifacts(run.info.run_id, "lineage.txt")).read_text()
    assert [line.split()[0] for line in lineage.splitlines()] == STAGES
    note, gain = run.data.tags["mlflow.note.content"], report["sets"]["held-out"]["differences"]["base"]["accuracy"]
    assert "right on 32 held-out prompts" in note
    assert figures.interval("accuracy", gain) in note
    assert str(finished / "evaluation" / "report.html") in note
    history = connect().get_metric_history(run.info.run_id, "reward")
    assert [(point.step, point.value) for point in history] == [(s["step"], s["reward"]) for s in steps]


def test_the_registered_version_carries_the_alias_and_loads_with_transformers(finished: Path, tmp_path: Path) -> None:
    import mlflow
    import torch
    from transformers import AutoModelForCausalLM

    from tasks.tracking.runs import connect, dataset_digests

    registration = json.loads((finished / "registration.json").read_text())
    version = connect().get_model_version_by_alias("arithmetic", "candidate")
    assert str(version.version) == registration["version"]
    assert f"at commit {version.tags['git.commit'][:12]}" in version.description
    digests = dataset_digests(finished)
    assert f"train {digests['train']}, eval {digests['eval']}" in version.description
    folder = mlflow.artifacts.download_artifacts("models:/arithmetic@candidate", dst_path=str(tmp_path))
    loaded = AutoModelForCausalLM.from_pretrained(f"{folder}/model")
    trained = AutoModelForCausalLM.from_pretrained(finished / "training" / "model")
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), trained.parameters(), strict=True))
    answers = read_parquet(finished / "evaluation" / "samples.parquet").filter(set="held-out")
    model = mlflow.pyfunc.load_model("models:/arithmetic@candidate")
    assert model.predict(answers["prompt"].to_list()) == answers["trained/completion"].to_list()
    assert version.tags["served.agreeing"] == version.tags["served.compared"] == str(answers.height)
    assert version.tags["served.reward_change"] == "0"
    pipeline = mlflow.transformers.load_model("models:/arithmetic@candidate")
    [served] = pipeline(answers["prompt"][0], max_new_tokens=6, do_sample=False, return_full_text=False)
    assert served["generated_text"] == answers["trained/completion"][0]


VLLM_ANSWER = """
import sys
from vllm import LLM, SamplingParams
llm = LLM(sys.argv[1], dtype="float32", enforce_eager=True, max_model_len=32)
print("answer:", llm.generate("12+3=", SamplingParams(temperature=0, max_tokens=4))[0].outputs[0].text)
"""


@pytest.mark.e2e
def test_the_registered_version_answers_in_vllm_as_in_transformers(finished: Path, tmp_path: Path) -> None:
    import mlflow
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from tasks.tracking.runs import connect

    connect()
    folder = mlflow.artifacts.download_artifacts("models:/arithmetic@candidate", dst_path=str(tmp_path)) + "/model"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer("12+3=", return_tensors="pt")["input_ids"]
    model = AutoModelForCausalLM.from_pretrained(folder)
    answer = model.generate(prompt, max_new_tokens=4, do_sample=False)[0, prompt.shape[1] :]
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", VLLM_ANSWER, folder], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"answer: {tokenizer.decode(answer, skip_special_tokens=True)}\n" in done.stdout


@pytest.mark.e2e
def test_running_again_skips_every_stage_and_an_edit_reruns_what_depends_on_it(
    finished: Path, inputs: Path, monkeypatch: pytest.MonkeyPatch, task_states: TaskStates
) -> None:
    parsed: list[dict[str, Any]] = []
    validate = RunConfig.model_validate
    monkeypatch.setattr(RunConfig, "model_validate", lambda values: (parsed.append(values), validate(values))[1])
    trained_at = (finished / "training" / "result.json").stat().st_mtime_ns
    _run(inputs)
    assert task_states("small") == [(stage, "Skipped") for stage in STAGES]
    parsed.clear()
    _run(inputs, "evaluation.confidence=0.5")
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

    _run(inputs)
    evaluate_run("small")
    assert task_states("small-evaluate", 1) == [("evaluate", "Skipped")]
    before = json.loads((finished / "evaluation" / "report.json").read_text())
    assert (before["policies"], before["champion"]) == (["base", "trained"], None)
    version = json.loads((finished / "registration.json").read_text())["version"]
    connect().set_registered_model_alias("arithmetic", "champion", version)
    evaluate_run("small", force=True)
    assert task_states("small-evaluate", 1) == [("evaluate", "Completed")]
    after = json.loads((finished / "evaluation" / "report.json").read_text())
    assert (_accuracy(after), after["lineage_key"]) == (_accuracy(before), before["lineage_key"])
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
    _run(inputs)
    assert task_states("small") == [*((stage, "Skipped") for stage in STAGES[:4]), ("register", "Completed")]
    assert int(json.loads((finished / "registration.json").read_text())["version"]) == int(version) + 1
    assert _mlflow_run(finished).data.metrics["eval/held-out/champion/accuracy"] == _accuracy(after)["mean"]


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

    with open_run(load_config(CONFIG, _overrides(inputs, "train.max_steps=5"))):
        pass
    with pytest.raises(
        StageError, match=r"(?s)evaluate of run 'small' .*grpo stage plan --run small.*grpo stage train"
    ):
        evaluate_run("small")
    _run(inputs)
    assert task_states("small") == [(stage, "Skipped") for stage in STAGES]


def test_a_promotion_is_tried_once_for_each_version(finished: Path, inputs: Path, task_states: TaskStates) -> None:
    _run(inputs, "promotion.automatic=true")
    skipped = [(stage, "Skipped") for stage in STAGES]
    *before, (task, state) = task_states("small", len(STAGES) + 1)
    assert (before, task, state in ("Promoted", "Refused")) == (skipped, "promote", True)
    _run(inputs, "promotion.automatic=true")
    assert task_states("small") == skipped


def test_bad_data_fails_validate_with_the_rows_and_trains_nothing(storage: Path, inputs: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    good = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(7)]
    write_lines(bad, [good[0], {"prompt": " ", "answer": None}, *good[1:]])
    with pytest.raises(Exception, match=r"breaks its contract") as error:
        _run(inputs, "name=bad-data", f"data.train={bad}")
    assert "train row 1, prompt: ' ' breaks blank_prompt" in str(error.value)
    assert "train row 1, answer: None breaks missing_value" in str(error.value)
    assert not (storage / "runs" / "bad-data" / "training").exists()


def test_an_impossible_plan_is_refused_with_fixes(storage: Path, inputs: Path) -> None:
    with pytest.raises(Exception, match=r"not divisible by num_generations=7") as error:
        _run(inputs, "name=bad-plan", "rollout.num_generations=7")
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
        _run(inputs, "name=bad-reward", 'rewards=[{function="fragile_rewards:fragile"}]')
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
            _run(inputs, "evaluation.confidence=0.6")
    finally:
        whole.rename(weights)
    findings = finished / "training" / "health.jsonl"
    findings.write_text("no JSON\n")  # nothing reads it but the page of the run, which is no reason to fail
    _run(inputs, "evaluation.confidence=0.6")
    findings.unlink()
    assert json.loads((finished / "evaluation" / "report.json").read_text())["confidence"] == 0.6
    assert not (finished / "evaluation" / "report.html").exists()


def test_an_unreachable_registry_fails_register_and_a_rerun_does_only_that(
    finished: Path, inputs: Path, monkeypatch: pytest.MonkeyPatch, task_states: TaskStates
) -> None:
    _run(inputs)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(Exception, match=r"127\.0\.0\.1"):
        _run(inputs, "registry.alias=second")
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    _run(inputs, "registry.alias=second")
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
    assert (figure.value, figure.step) == (_accuracy(report)["mean"], 4)
    assert figure.dataset_digest == dataset_digests(finished)["eval"]
    costs = {"cost/gpu_hours": seconds / 3600, "cost/money": 2 * seconds / 3600}
    run_metrics = _mlflow_run(finished).data.metrics
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
