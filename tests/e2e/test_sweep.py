"""`grpo sweep` for real: killed and interrupted in its second arm it goes on there; nothing is done twice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlflow
import psutil
import pytest
import tomli_w

from benchmarks.command import python_path
from tests.conftest import config_values, write_sums
from tests.e2e.holding import until_stuck
from tests.processes import wait_for
from tests.serving import grpo_serve, hear_ctrl_c, prefect_server

pytestmark = pytest.mark.e2e

# The training of the second arm stops for good in the call that STUCK_AT says.
REWARD = """
import os, threading
calls = []
def patient(completions, completion_ids):
    calls.append(1)
    arms = len(os.listdir(os.path.join(os.environ["GRPO_STORAGE"], "runs")))
    if str(len(calls)) == os.environ.get("STUCK_AT") and arms == 2:
        print("stuck in the second arm", flush=True)
        threading.Event().wait()
    return [-float(len(ids)) for ids in completion_ids]
"""


# On held-out prompts the second arm gets the worst reward there is, the first the best.
UNEQUAL = """
import sys
def unequal(prompts, completions):
    worst = "learning_rate-0.02" in " ".join(sys.argv) and int(prompts[0].split("+")[0]) >= 60
    return [-6.0 if worst else float(len(c) % 2 - 1) for c in completions]
"""


@pytest.fixture
def command(tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    (tmp_path / "patience.py").write_text(REWARD)
    for name, first, last in (("train", 10, 34), ("eval", 60, 76), ("final", 76, 90)):
        write_sums(tmp_path / f"{name}.parquet", first, last)
    values = config_values(model_folder, tmp_path, max_steps=6, save_steps=2)
    values["rewards"] = [{"function": "patience:patient", "range": [-6.0, 0.0]}]
    values["evaluation"] = {"sets": [{"name": "final", "data": str(tmp_path / "final.parquet")}]}
    (tmp_path / "config.toml").write_text(tomli_w.dumps({**values, "name": "sums"}))
    monkeypatch.setenv("GRPO_STORAGE", str(tmp_path / "storage"))
    monkeypatch.setenv("PYTHONPATH", python_path(tmp_path))
    return [sys.executable, "-m", "flows.cli.main", "sweep", str(tmp_path / "config.toml"), "--seeds", "2"]


def _until_stuck(command: list[str], call: int, number: signal.Signals) -> tuple[str, int]:
    """What the command prints until its second arm is stuck in this call of the reward, and its exit status after the
    signal then; nothing that it started is left."""
    process, started, said = until_stuck(command, {**os.environ, "STUCK_AT": str(call)}, preexec_fn=hear_ctrl_c)
    process.send_signal(number)
    rest, _ = process.communicate(timeout=120)
    assert not psutil.wait_procs(started, timeout=60)[1]
    return said + rest, process.returncode


def _receipt(storage: Path, arm: str, path: str) -> dict[str, Any]:
    return json.loads((storage / "runs" / arm / path).read_text())


def test_a_sweep_that_was_killed_and_interrupted_goes_on_and_does_nothing_twice(
    command: list[str], tmp_path: Path
) -> None:
    storage, first, second = tmp_path / "storage", "sums.sweep.seed-0", "sums.sweep.seed-1"
    killed, _ = _until_stuck(command, 4, signal.SIGKILL)
    made = _receipt(storage, first, "registration.json")["made_at"]
    interrupted, status = _until_stuck(command, 1, signal.SIGINT)
    assert status == 130, interrupted
    assert "of 6 updates saved; run the same again to continue" in interrupted

    done = subprocess.run(command, capture_output=True, text=True, timeout=480)
    assert done.returncode == 0, done.stdout + done.stderr
    said = "".join([killed, interrupted, done.stdout, done.stderr])
    assert said.count("evaluating the base policy") == 2, "on each of two sets, by one arm"
    assert said.count("evaluating the trained policy") == 4
    assert done.stderr.count(f"{first}: up to date, skipped") == 1
    assert _receipt(storage, first, "registration.json")["made_at"] == made
    assert _receipt(storage, second, "training/result.json")["resumed_at_step"] == 3
    for path in ("dataset/report.json", "plan.json"):
        assert "taken_from" not in _receipt(storage, first, path)
        assert _receipt(storage, second, path)["taken_from"] == first

    chosen = next(arm for arm in (first, second) if f"Chosen on held-out: {arm}" in done.stdout)
    assert chosen in (storage / "sweeps" / "sums.sweep" / "report.html").read_text()
    client = mlflow.MlflowClient(f"sqlite:///{storage / 'mlflow' / 'mlflow.db'}")
    candidate = client.get_model_version_by_alias("sums", "candidate")
    assert candidate.tags["run"] == chosen
    arms = {it.tags["run"]: it.tags for it in client.search_model_versions("name = 'sums'")}
    assert {arm: (tags["sweep"], "sweep.chosen" in tags) for arm, tags in arms.items()} == {
        arm: ("sums.sweep", arm == chosen) for arm in (first, second)
    }
    runs = {run.info.run_name: run for run in client.search_runs([client.get_run(candidate.run_id).info.experiment_id])}
    assert runs.keys() == {"sums.sweep", "seed-0", "seed-1"}
    assert {run.data.tags["sweep"] for run in runs.values()} == {"sums.sweep"}
    parent = runs["sums.sweep"]
    assert {runs[arm].data.tags["mlflow.parentRunId"] for arm in ("seed-0", "seed-1")} == {parent.info.run_id}
    assert {run.info.status for run in runs.values()} == {"FINISHED"}
    assert parent.data.metrics["arms"] == 2
    tokens = [runs[arm].data.metrics["cost/sampled_tokens"] for arm in ("seed-0", "seed-1")]
    assert parent.data.metrics["cost/sampled_tokens"] == sum(tokens)
    assert "eval/held-out/trained/reward" in parent.data.metrics
    promoted = subprocess.run([*command[:3], "promote", "sums"], capture_output=True, text=True, timeout=240)
    assert promoted.returncode == 1
    assert "an arm of the sweep 'sums.sweep', which chooses on 'held-out'" in promoted.stderr


def test_an_arm_that_falls_behind_is_stopped_and_stays_so(command: list[str], tmp_path: Path) -> None:
    (tmp_path / "patience.py").write_text(UNEQUAL.replace("def unequal", "def patient"))
    options = ["--grid", "train.learning_rate=0.01,0.02", "--stop-early", "--set", "train.eval_steps=2"]
    started = [*command[:-2], *options]
    first, second = (f"sums.sweep.learning_rate-{rate}" for rate in (0.01, 0.02))
    done = subprocess.run(started, capture_output=True, text=True, timeout=480)
    said = " ".join((done.stdout + done.stderr).split())
    assert done.returncode == 0, said
    assert f"{second}: stopped after update 2 of 6" in said
    assert f"Chosen on held-out: {first}" in said
    assert not (tmp_path / "storage" / "runs" / second / "evaluation").exists()
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'storage' / 'mlflow' / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("grpo").experiment_id
    status = {run.info.run_name: run.info.status for run in client.search_runs([experiment])}
    assert status == {"sums.sweep": "FINISHED", "learning_rate-0.01": "FINISHED", "learning_rate-0.02": "KILLED"}
    again = subprocess.run(started, capture_output=True, text=True, timeout=480)
    assert again.returncode == 0, again.stdout + again.stderr
    assert again.stderr.count(", skipped") == 2, again.stderr


def test_a_search_that_was_killed_goes_on_with_the_same_trials(command: list[str], tmp_path: Path) -> None:
    storage = tmp_path / "storage"
    options = ["--range", "train.learning_rate=0.001:0.02:log", "--grid", "algorithm.beta=0.0,0.1", "--optuna", "3"]
    started = [*command[:-2], *options]
    _until_stuck(started, 4, signal.SIGKILL)
    trials = storage / "sweeps" / "sums.sweep" / "trials.json"
    before = json.loads(trials.read_text())["trials"]
    names = [f"sums.sweep.learning_rate-{it['train.learning_rate']}_beta-{it['algorithm.beta']}" for it in before]
    assert {path.name for path in (storage / "runs").iterdir()} == {*names} and len(names) == 2
    made = _receipt(storage, names[0], "registration.json")["made_at"]

    done = subprocess.run(started, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    after = json.loads(trials.read_text())["trials"]
    assert after[:2] == before and len(after) == 3
    assert _receipt(storage, names[0], "registration.json")["made_at"] == made
    assert _receipt(storage, names[1], "training/result.json")["resumed_at_step"] == 3
    said = " ".join(done.stdout.split())
    assert "Optuna proposed 3 arms from the figures of earlier arms on the same prompts" in said
    assert "Bonferroni over 3 settings" in said
    client = mlflow.MlflowClient(f"sqlite:///{storage / 'mlflow' / 'mlflow.db'}")
    runs = client.search_runs([client.get_experiment_by_name("grpo").experiment_id])
    [parent] = [run.info.run_id for run in runs if run.info.run_name == "sums.sweep"]
    assert [run.data.tags.get("mlflow.parentRunId") for run in runs if run.info.run_id != parent] == [parent] * 3


def test_a_sweep_from_the_form_is_cancelled_with_its_arms_and_goes_on(command: list[str], tmp_path: Path) -> None:
    """Each arm is a run of the pipeline's deployment, below that of the sweep."""
    storage, presets = tmp_path / "storage", tmp_path / "presets"
    storage.mkdir()
    presets.mkdir()
    (tmp_path / "config.toml").rename(presets / "small.toml")
    output = storage / "runs" / "sums.sweep.seed-1" / "training.partial" / "output.log"
    with prefect_server(storage, GRPO_CONFIGS=str(presets), PYTHONPATH=os.environ["PYTHONPATH"]) as server:

        def arms(parent: str) -> dict[str, str]:
            """The final states of the flow runs below that of the sweep."""
            found = server.filter("flow_runs")
            below = {task["id"] for task in server.filter("task_runs", flow_runs={"id": {"any_": [parent]}})}
            return {
                run["name"]: server.wait(run["id"])["state_type"] for run in found if run["parent_task_run_id"] in below
            }

        with grpo_serve(server, STUCK_AT="4"):
            cancelled = server.trigger("sweep/local", preset="small", seeds=2)
            wait_for(lambda: output.exists() and "stuck in the second arm" in output.read_text())
            server.cancel(cancelled)
            assert server.wait(cancelled)["state_type"] == "CANCELLED"
            assert arms(cancelled) == {"sums.sweep.seed-0": "COMPLETED", "sums.sweep.seed-1": "CANCELLED"}
        with grpo_serve(server):
            again = server.trigger("sweep/local", preset="small", seeds=2)
            assert server.wait(again)["state_type"] == "COMPLETED", server.messages(again)
            assert arms(again) == {"sums.sweep.seed-1": "COMPLETED"}
            ranges = {"train.learning_rate": "0.001:0.02:log"}
            found = server.trigger("sweep/local", preset="small", optuna=2, ranges=ranges, name="search")
            assert server.wait(found)["state_type"] == "COMPLETED", server.messages(found)
            assert [*arms(found).values()] == ["COMPLETED"] * 2
            events = server.events("grpo.sweep.cancelled", "grpo.sweep.completed")
            assert events["grpo.sweep.cancelled"]["sweep"] == "sums.sweep"
            completed = events["grpo.sweep.completed"]
            assert completed["chosen"].startswith(f"{completed['sweep']}.") and completed["arms"] == 2
    assert _receipt(storage, "sums.sweep.seed-1", "training/result.json")["resumed_at_step"] == 3
    assert _receipt(storage, "sums.sweep.seed-1", "dataset/report.json")["taken_from"] == "sums.sweep.seed-0"
    assert (storage / "sweeps" / "sums.sweep" / "report.html").exists()
