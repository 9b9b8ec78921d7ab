"""What cannot go on says why in one sentence, in the terminal and in Prefect's log, and the traceback is in errors.log;
what is killed leaves no process and loses no update."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import tomli_w
from mlflow import MlflowClient

from benchmarks.command import python_path
from tests.conftest import config_values, write_config, write_sums
from tests.e2e.holding import until_stuck, write_patient
from tests.serving import Served, free_ports, grpo_serve, hear_ctrl_c, prefect_server

pytestmark = pytest.mark.e2e

CLI = [sys.executable, "-m", "flows.cli.main"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    storage = tmp_path_factory.mktemp("refusals")
    write_patient(storage)
    with prefect_server(storage, PYTHONPATH=python_path(storage), MAY_GO_ON=str(storage / "go-on")) as server:
        yield server


def _values(server: Served, model: Path, **changes: Any) -> dict[str, Any]:
    return config_values(model, server.storage, max_steps=6, save_steps=100) | changes


def _write(server: Served, values: dict[str, Any]) -> str:
    file = server.storage / f"{values['name']}.toml"
    file.write_text(tomli_w.dumps(values))
    return str(file)


def _refused(server: Served, *arguments: str, **environment: str) -> tuple[int, str]:
    """Exit status and all that a command of `grpo` prints, in which there is no traceback."""
    done = subprocess.run(
        [*CLI, *arguments], env={**server.environment, **environment}, capture_output=True, text=True, timeout=300
    )
    said = done.stdout + done.stderr
    assert "Traceback" not in said
    return done.returncode, said


def test_data_that_breaks_its_contract_is_refused_once(server: Served, model_folder: Path) -> None:
    values = _values(server, model_folder, name="overlap")
    values["data"]["eval"] = str(write_sums(server.storage / "overlap.parquet", 30, 46))
    code, said = _refused(server, "run", _write(server, values))
    assert (code, said.count("the data breaks its contract")) == (1, 1), said
    assert len([line for line in said.splitlines() if " | ERROR " in line]) == 0
    assert "Traceback" in (server.storage / "runs" / "overlap" / "errors.log").read_text()


def test_a_tracking_server_that_is_gone_is_refused_once_with_what_to_do(server: Served, model_folder: Path) -> None:
    uri = f"http://127.0.0.1:{free_ports(1)[0]}"
    values = _values(server, model_folder, name="untracked")
    code, said = _refused(server, "run", _write(server, values), MLFLOW_TRACKING_URI=uri)
    sentence = f"untracked: MLflow at {uri} does not answer (Connection refused): start the server, then run the same"
    assert (code, said.count(sentence), said.count("Connection refused")) == (1, 1, 1), said


def test_a_rollback_without_an_earlier_champion_is_refused_once(server: Served) -> None:
    uri = f"sqlite:///{server.storage / 'registry.db'}"
    MlflowClient(uri, uri).create_registered_model("sums")
    code, said = _refused(server, "rollback", "sums", MLFLOW_TRACKING_URI=uri)
    assert (code, said.count("sums has no champion before")) == (2, 1), said


def test_a_form_with_sizes_that_do_not_go_together_fails_before_any_stage(server: Served, model_folder: Path) -> None:
    values = _values(server, model_folder, name="sizes")
    values["train"]["per_device_train_batch_size"] = 13
    with grpo_serve(server):
        run_id = server.trigger("pipeline/local", changes=values)
        state = server.wait(run_id)["state"]
        said = server.messages_with(run_id, "every group must be whole")
    assert state["type"] == "FAILED"
    assert "any one of these works: " in state["message"]
    assert server.tasks(run_id, 0) == []
    assert said.count("every group must be whole") == 1, said
    assert "Traceback" not in said
    assert (server.storage / "grpo-serve.log").read_text().count("every group must be whole") == 1


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_keeps_the_state_and_says_how_to_go_on(
    number: signal.Signals, status: int, server: Served, model_folder: Path
) -> None:
    name = f"stopped-{status}"
    values = _values(server, model_folder, name=name, rewards=[{"function": "patience:patient"}])
    command = [*CLI, "run", _write(server, values)]
    process, started, _ = until_stuck(command, server.environment, start_new_session=True, preexec_fn=hear_ctrl_c)
    os.killpg(process.pid, number)  # as a terminal does with SIGINT, systemd with SIGTERM
    said = process.communicate(timeout=300)[0]
    sentence = f"{name}: train was interrupted, 3 of 6 updates saved; run the same again to continue"
    assert (process.returncode, said.count(sentence)) == (status, 1), said
    assert "Crash" not in said and "Traceback" not in said
    assert not psutil.wait_procs(started, timeout=60)[1]
    [run] = server.filter("flow_runs", flow_runs={"name": {"any_": [name]}})
    assert (run["state_type"], run["state"]["message"]) == ("CANCELLED", sentence.removeprefix(f"{name}: "))
    assert server.tasks(run["id"], 3)[-1] == ("train", "Cancelled")
    status = subprocess.run([*CLI, "status", name], env=server.environment, capture_output=True, text=True)
    assert "3 of 6 updates saved" in " ".join(status.stdout.replace("│", " ").split())


def test_a_killed_run_leaves_no_process_and_continues_from_its_last_update(tmp_path: Path, model_folder: Path) -> None:
    write_patient(tmp_path)
    rewards = [{"function": "patience:patient"}]
    config = write_config(tmp_path, model_folder, {"rewards": rewards}, max_steps=6, save_steps=2)
    go_on = tmp_path / "go-on"
    environment = {
        **os.environ,
        "GRPO_STORAGE": str(tmp_path / "storage"),
        "PYTHONPATH": python_path(tmp_path),
        "MAY_GO_ON": str(go_on),
    }
    command = [*CLI, "run", str(config), "--set", "name=killed"]
    process, started, _ = until_stuck(command, environment)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=120)
    assert not psutil.wait_procs(started, timeout=60)[1]

    go_on.touch()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "storage" / "runs" / "killed" / "training" / "result.json").read_text())
    assert (result["resumed_at_step"], result["counted"]["updates"]) == (3, 6)
