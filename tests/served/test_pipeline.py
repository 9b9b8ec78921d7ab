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

from grpo_core.config.files import load_config
from grpo_core.system.tables import read_parquet
from tasks.rendering import figures
from tests.served.conftest import CONFIG, STAGES, accuracy_of, mlflow_run_of
from tests.serving import Served

pytestmark = pytest.mark.slow


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
    tags = mlflow_run_of(finished).data.tags
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

    run = mlflow_run_of(finished)
    report = json.loads((finished / "evaluation" / "report.json").read_text())
    steps = [json.loads(line) for line in (finished / "training" / "metrics.jsonl").read_text().splitlines()]
    assert run.info.status == "FINISHED"
    assert run.data.params["train.learning_rate"] == str(load_config(CONFIG).train.learning_rate)
    assert run.data.params["plan.max_steps"] == "4"
    assert run.data.metrics["eval/held-out/trained/accuracy"] == accuracy_of(report)["mean"]
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
