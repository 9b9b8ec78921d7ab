"""A training cancelled, told to end with its runner or with the worker of a work pool, or killed with it: no process
stays, nothing is lost, no one waits for ever; and trainings that share the GPUs of a machine: as many as fit train,
each on its own GPUs, and the next one waits."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.command import python_path
from grpo_core.config.files import dump_config, load_config, parse_config
from tests.conftest import config_values
from tests.e2e.holding import write_patient
from tests.e2e.place import PROJECT, metrics, resumed_at_step
from tests.nvidia_smi import put_nvidia_smi
from tests.processes import runs, wait_for, words
from tests.served.test_deployments import _new_pool, _prefect, _worker
from tests.serving import Served, grpo_serve, prefect_server

END_SECONDS = 30

ALLOWED = {"GRPO_REWARD_MODULES": "patience"}  # which the form may name

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Iterator[Served]:
    """A Prefect server, and in its storage the run directory `template`, to be trained."""
    storage = tmp_path_factory.mktemp("cancel")
    write_patient(storage)
    _write_config(storage, "template", config_values(model_folder, storage, max_steps=6, save_steps=100))
    paths = python_path(storage, PROJECT)
    with prefect_server(storage, PYTHONPATH=paths, MAY_GO_ON=str(storage / "go-on"), **ALLOWED) as server:
        with grpo_serve(server):
            for stage in ("validate", "plan"):
                done = server.wait(server.trigger(f"{stage}/local", run="template"))
                assert done["state_type"] == "COMPLETED", server.messages(done["id"])
        yield server


def _write_config(storage: Path, name: str, values: dict[str, Any]) -> None:
    config = parse_config({**values, "name": name, "rewards": [{"function": "patience:patient"}]})
    (storage / "runs" / name).mkdir(parents=True)
    (storage / "runs" / name / "config.toml").write_text(dump_config(config))


def _start(server: Served, name: str) -> str:
    """Id of a flow run that trains a copy of the template, made where there is none yet."""
    folder = server.storage / "runs" / name
    if not folder.exists():
        shutil.copytree(server.storage / "runs" / "template", folder, ignore=shutil.ignore_patterns("training*"))
        config = (folder / "config.toml").read_text()
        (folder / "config.toml").write_text(config.replace('name = "template"', f'name = "{name}"'))
    return server.trigger("train/local", run=name)


def _finish(server: Served, run_id: str) -> str:
    """The final state's name, where the training may go on."""
    (server.storage / "go-on").touch()
    state = server.wait(run_id)["state_name"]
    (server.storage / "go-on").unlink()
    return state


def _wait_until_stuck(server: Served, name: str) -> None:
    output = _partial(server, name) / "output.log"
    wait_for(lambda: output.exists() and "stuck" in output.read_text())


def _partial(server: Served, name: str) -> Path:
    return server.storage / "runs" / name / "training.partial"


def _processes(runner: psutil.Process, name: str) -> list[psutil.Process]:
    """Those that the runner has started for the training of that run, from its supervisor on."""
    found = [p for p in runner.children(recursive=True) if f"/runs/{name}" in " ".join(words(p))]
    assert any("grpo_core.train" in words(process) for process in found)
    return found


def _wait_until_ended(processes: list[psutil.Process]) -> None:
    wait_for(lambda: not any(map(runs, processes)), END_SECONDS)


def _slots_taken(server: Served) -> int:
    return server.get("/v2/concurrency_limits/grpo-training")["active_slots"]


def _result(server: Served, name: str) -> tuple[int | None, list[dict[str, float]]]:
    """The update from which a training went on, and the metrics of all."""
    run = server.storage / "runs" / name
    return resumed_at_step(run), metrics(run)


def _states(server: Served, run_id: str) -> list[str]:
    """Names of the states that a flow run has been in since it was triggered. "Late" comes and goes."""
    states = server.get(f"/flow_run_states/?flow_run_id={run_id}")
    return [state["name"] for state in states if state["name"] not in ("Scheduled", "Late", "Submitting")]


def _tracked(server: Served, training: Path) -> list[Any]:
    """The MLflow runs of this training's experiment that have its name."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{server.storage / 'mlflow' / 'mlflow.db'}")
    run = client.get_run(json.loads((training / "mlflow.json").read_text())["run_id"])
    return client.search_runs([run.info.experiment_id], f"run_name = '{run.info.run_name}'")


def _tracked_status(server: Served, training: Path) -> str:
    own = json.loads((training / "mlflow.json").read_text())["run_id"]
    return next(run.info.status for run in _tracked(server, training) if run.info.run_id == own)


@pytest.fixture(scope="module")
def undisturbed(server: Served) -> list[dict[str, float]]:
    with grpo_serve(server):
        run_id = _start(server, "undisturbed")
        assert _finish(server, run_id) == "Completed", server.messages(run_id)
    shown = {a["key"] for a in server.filter("artifacts", flow_runs={"id": {"any_": [run_id]}})}
    assert shown == {"training-progress", "training-live", "training-curves"}
    return _result(server, "undisturbed")[1]


def test_a_cancelled_training_saves_ends_and_goes_on_from_there(
    server: Served, undisturbed: list[dict[str, float]]
) -> None:
    with grpo_serve(server) as runner:
        cancelled = _start(server, "cancelled")
        _wait_until_stuck(server, "cancelled")
        waiting = _start(server, "waiting")
        wait_for(lambda: "waiting for 1 slot " in server.messages(waiting))
        processes = _processes(runner, "cancelled")
        server.cancel(cancelled)
        _wait_until_ended(processes)
        server.wait(cancelled, "CANCELLED")
        sentence = "train was interrupted, 3 of 6 updates saved; run the same again to continue"
        said = server.messages_with(cancelled, sentence)
        assert said.count(sentence) == 1
        assert not any(word in said for word in ("Crash", "SIGKILL", "Traceback"))
        assert server.tasks(cancelled, 1) == [("train", "Cancelled")]
        partial = _partial(server, "cancelled")
        assert [path.name for path in (partial / "checkpoints").iterdir()] == ["step-000003"]
        assert "told to stop, the checkpoint of step 3" in (partial / "output.log").read_text()
        assert _tracked_status(server, partial) == "KILLED"

        _wait_until_stuck(server, "waiting")  # it got the slot
        server.cancel(waiting)
        server.wait(waiting, "CANCELLED")
        wait_for(lambda: _slots_taken(server) == 0)

        assert _finish(server, _start(server, "cancelled")) == "Completed"
    resumed, found = _result(server, "cancelled")
    assert (resumed, found) == (3, undisturbed)
    assert _tracked_status(server, server.storage / "runs" / "cancelled" / "training") == "FINISHED"


def test_a_suspended_training_frees_its_slot_and_goes_on_when_resumed_unless_it_is_cancelled(
    server: Served, undisturbed: list[dict[str, float]]
) -> None:
    with grpo_serve(server) as runner:
        suspended = _start(server, "suspended")
        _wait_until_stuck(server, "suspended")
        processes = _processes(runner, "suspended")
        given_up = _start(server, "given-up")
        server.suspend(suspended)
        _wait_until_ended(processes)
        sentence = "; Resume goes on with it"
        assert sentence in server.messages_with(suspended, sentence)
        assert [path.name for path in (_partial(server, "suspended") / "checkpoints").iterdir()] == ["step-000003"]
        _wait_until_stuck(server, "given-up")  # it got the slot
        processes = _processes(runner, "given-up")
        server.suspend(given_up)
        server.cancel(given_up)
        _wait_until_ended(processes)
        assert [path.name for path in (_partial(server, "given-up") / "checkpoints").iterdir()] == ["step-000003"]
        wait_for(lambda: _slots_taken(server) == 0)
        assert server.get(f"/flow_runs/{suspended}")["state_name"] == "Suspended"
        server.resume(suspended)
        assert _finish(server, suspended) == "Completed"
        assert server.get(f"/flow_runs/{given_up}")["state_name"] == "Cancelled"
    resumed, found = _result(server, "suspended")
    assert (resumed, found) == (3, undisturbed)
    assert "Crashed" not in _states(server, suspended)


def test_cancelling_a_pipeline_cancels_the_training_that_it_has_handed_over(server: Served, model_folder: Path) -> None:
    changes = {
        **config_values(model_folder, server.storage, max_steps=6, save_steps=100),
        "name": "handed",
        "rewards": [{"function": "patience:patient"}],
    }
    with grpo_serve(server, GRPO_GPU_DEPLOYMENT="local") as runner:
        run_id = server.trigger("pipeline/local", changes=changes)
        _wait_until_stuck(server, "handed")
        processes = _processes(runner, "handed")
        server.cancel(run_id)
        _wait_until_ended(processes)
        server.wait(run_id, "CANCELLED")
        [handed] = server.filter("flow_runs", flow_runs={"name": {"any_": ["handed-train"]}})
        server.wait(handed["id"], "CANCELLED")
        wait_for(lambda: _slots_taken(server) == 0)
    assert [path.name for path in (_partial(server, "handed") / "checkpoints").iterdir()] == ["step-000003"]


def test_told_to_end_grpo_serve_ends_its_trainings_too_each_with_a_checkpoint(
    server: Served, undisturbed: list[dict[str, float]]
) -> None:
    with grpo_serve(server) as runner:
        run_id = _start(server, "told")
        _wait_until_stuck(server, "told")
        processes = [runner, *runner.children(recursive=True)]
        runner.terminate()
        _wait_until_ended(processes)
    assert [path.name for path in (_partial(server, "told") / "checkpoints").iterdir()] == ["step-000003"]
    assert server.wait(run_id, "SCHEDULED")["state"]["message"] == "train was interrupted, 3 of 6 updates saved"
    wait_for(lambda: _slots_taken(server) == 0)
    with grpo_serve(server):
        assert _finish(server, run_id) == "Completed", "it did not go on by itself"
    assert _result(server, "told")[1] == undisturbed
    assert "Crashed" not in _states(server, run_id)


def test_a_flow_s_process_that_is_told_to_end_from_outside_goes_on_by_itself(
    server: Served, undisturbed: list[dict[str, float]]
) -> None:
    with grpo_serve(server) as runner:
        run_id = _start(server, "evicted")
        _wait_until_stuck(server, "evicted")
        [flow] = [p for p in runner.children(recursive=True) if "prefect.engine" in " ".join(words(p))]
        flow.terminate()
        sentence = "train was interrupted, 3 of 6 updates saved; it goes on by itself"
        assert "Crash" not in server.messages_with(run_id, sentence)
        assert _finish(server, run_id) == "Completed"
    resumed, found = _result(server, "evicted")
    assert (resumed, found) == (3, undisturbed)
    assert _states(server, run_id) == ["Pending", "Running", "AwaitingRetry", "Pending", "Running", "Completed"]
    assert sorted(server.tasks(run_id, 2)) == [("train", "Cancelled"), ("train", "Completed")]
    training = server.storage / "runs" / "evicted" / "training"
    assert _tracked_status(server, training) == "FINISHED"
    assert len(_tracked(server, training)) == 1


def test_a_run_killed_with_its_runner_is_shown_as_crashed_and_its_retry_goes_on(
    server: Served, undisturbed: list[dict[str, float]]
) -> None:
    with grpo_serve(server) as runner:
        run_id = _start(server, "killed")
        _wait_until_stuck(server, "killed")
        trained_by = _processes(runner, "killed")
        for process in [runner, *runner.children(recursive=True)]:
            if process not in trained_by:
                process.send_signal(signal.SIGKILL)
        _wait_until_ended(trained_by)
    server.wait(run_id, "CRASHED")
    others = {run["name"]: run["state_type"] for run in server.filter("flow_runs") if run["id"] != run_id}
    assert others["undisturbed-train"] == "COMPLETED", "the watch took the end of a run for silence"
    wait_for(lambda: _slots_taken(server) == 0)
    with grpo_serve(server):
        server.retry(run_id)
        assert _finish(server, run_id) == "Completed"
    resumed, found = _result(server, "killed")
    assert (resumed, found) == (3, undisturbed)
    assert sorted(server.tasks(run_id, 2)) == [("train", "Completed"), ("train", "Crashed")]


def test_the_next_worker_goes_on_with_what_a_stopped_one_was_training(tmp_path: Path, model_folder: Path) -> None:
    write_patient(tmp_path)
    _write_config(tmp_path, "stopped", config_values(model_folder, tmp_path, max_steps=6, save_steps=100))
    path = python_path(tmp_path, PROJECT)
    with prefect_server(tmp_path, PYTHONPATH=path, MAY_GO_ON=str(tmp_path / "go-on")) as server:
        pools = [_new_pool(pool, "process", "process-job.json") for pool in ("cpu", "gpu")]
        _prefect(server, *pools, ["deploy", "--all"])
        for stage in ("validate", "plan"):
            command = [sys.executable, "-m", "flows.cli.main", "stage", stage, "--run", "stopped"]
            subprocess.run(command, env=server.environment, check=True)
        with _worker(server, "gpu") as worker:
            run_id = server.trigger("train/gpu", run="stopped")
            _wait_until_stuck(server, "stopped")
            trained_by = _processes(worker, "stopped")
            worker.terminate()
            _wait_until_ended(trained_by)
            worker.wait()
        assert server.wait(run_id, "SCHEDULED")["state"]["message"] == "train was interrupted, 3 of 6 updates saved"
        (tmp_path / "go-on").touch()
        with _worker(server, "gpu"):
            assert server.wait(run_id)["state_name"] == "Completed", server.messages(run_id)
        attempt = ["Pending", "Running"]
        assert _states(server, run_id) == [*attempt, "AwaitingRetry", *attempt, "Completed"]
    result = json.loads((tmp_path / "runs" / "stopped" / "training" / "result.json").read_text())
    assert result["resumed_at_step"] == 3


@pytest.fixture
def two_gpus(tmp_path: Path, model_folder: Path) -> Iterator[Served]:
    """A Prefect server of a machine with two GPUs (pretended: nothing is computed on them)."""
    put_nvidia_smi(tmp_path, 2)
    write_patient(tmp_path)
    _write_config(tmp_path, "template", config_values(model_folder, tmp_path, max_steps=6))
    paths: dict[str, Any] = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": python_path(tmp_path, PROJECT)}
    with prefect_server(tmp_path, MAY_GO_ON=str(tmp_path / "never"), **paths) as server:
        yield server


def _train(server: Served, name: str, **keys: Any) -> str:
    """Id of a flow run that trains a copy of the template, with other keys of [train]."""
    runs = server.storage / "runs"
    shutil.copytree(runs / "template", runs / name)
    values = load_config(runs / name / "config.toml").model_dump(mode="json", exclude_none=True)
    values["train"] |= keys
    (runs / name / "config.toml").write_text(dump_config(parse_config({**values, "name": name})))
    if keys:
        _do(server, "plan", name)
    return server.trigger("train/local", run=name)


def _do(server: Served, stage: str, name: str) -> None:
    done = server.wait(server.trigger(f"{stage}/local", run=name))
    assert done["state_type"] == "COMPLETED", server.messages(done["id"])


def _gpus(runner: psutil.Process, name: str) -> set[str]:
    trained_by = [it for it in _processes(runner, name) if "grpo_core.train" in " ".join(words(it))]
    return {it.environ()["CUDA_VISIBLE_DEVICES"] for it in trained_by}


def test_two_trainings_share_two_gpus_and_one_that_wants_both_waits_for_them(two_gpus: Served) -> None:
    server = two_gpus
    with grpo_serve(server) as runner:
        for stage in ("validate", "plan"):
            _do(server, stage, "template")
        first, second = (_train(server, name) for name in ("one", "two"))
        _wait_until_stuck(server, "one")
        _wait_until_stuck(server, "two")
        assert sorted([_gpus(runner, "one"), _gpus(runner, "two")], key=min) == [{"0"}, {"1"}]
        waiting = _train(server, "both", num_processes=2, per_device_train_batch_size=4)
        sentence = (
            "waiting for 2 slots of the concurrency limit grpo-training: 2 of 2 taken (by one, two); number 1 in line"
        )
        wait_for(lambda: sentence in server.messages(waiting))

        for run_id in (first, second):
            server.cancel(run_id)
            server.wait(run_id, "CANCELLED")
        _wait_until_stuck(server, "both")
        assert _gpus(runner, "both") == {"0,1"}
        server.cancel(waiting)
        server.wait(waiting, "CANCELLED")
