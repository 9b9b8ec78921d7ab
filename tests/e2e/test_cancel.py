"""A training cancelled, or killed with all that watched it: nothing is left running, nothing lost, nobody blocked."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import tomli_w
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate
from prefect.client.schemas.filters import TaskRunFilter, TaskRunFilterFlowRunId
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Cancelling, Scheduled

from tests.conftest import config_values, write_sums

pytestmark = pytest.mark.slow

CANCEL_SECONDS = 30
DEADLINE = 300.0  # of what has no deadline of its own

# Training stops for good inside the fourth rollout, until the file that allows it to go on exists.
REWARD = """
import os, threading
calls = []
def patient(completions, completion_ids):
    calls.append(1)
    if len(calls) == 4 and not os.path.exists(os.environ["MAY_GO_ON"]):
        print("stuck in the fourth rollout", flush=True)
        threading.Event().wait()
    return [-float(len(ids)) for ids in completion_ids]
"""

SERVED = """
from flows.environment import configure
configure()
from prefect import flow
from grpo_core.config import load_config
from tasks.attempts import close_left_open
from tasks.plan import plan
from tasks.storage import open_run
from tasks.train import train
from tasks.validate import validate

@flow(name="until-trained")
def until_trained(config: str, name: str):
    close_left_open()
    run = open_run(load_config(config, [f"name={name}"]))
    validate(run)
    plan(run)
    train(run)

if __name__ == "__main__":
    until_trained.serve("here", limit=2)
"""


def _wait_for(condition: Callable[[], Any], seconds: float = DEADLINE) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not within {seconds:g} s"
        time.sleep(0.2)
    return found


def _environment(folder: Path, api: str) -> dict[str, str]:
    return {
        **os.environ,
        "PREFECT_HOME": str(folder / "prefect"),
        "PREFECT_API_URL": api,
        "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
        "GRPO_STORAGE": str(folder / "storage"),
        "PYTHONPATH": f"{folder}{os.pathsep}{Path(__file__).parents[2]}",
        "MAY_GO_ON": str(folder / "go-on"),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Path:
    folder = tmp_path_factory.mktemp("cancel")
    (folder / "patience.py").write_text(REWARD)
    (folder / "served.py").write_text(SERVED)
    write_sums(folder / "train.parquet", 10, 34)
    write_sums(folder / "eval.parquet", 60, 76)
    values = config_values(model_folder, folder, max_steps=6, save_steps=100)
    values["rewards"] = [{"function": "patience:patient"}]
    (folder / "config.toml").write_text(tomli_w.dumps(values))
    return folder


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[SyncPrefectClient]:
    """Of a server of its own, with the limit and the automation that set-up makes."""
    from flows.crashes import ensure_crash_automation
    from tasks.train import TRAINING_LIMIT

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (folder / "prefect").mkdir()
    api = f"http://127.0.0.1:{port}/api"
    with (folder / "server.log").open("w") as log:
        command = ["-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
        server = subprocess.Popen(
            [sys.executable, "-m", "tasks.supervise", "10", sys.executable, *command],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env=_environment(folder, api),
        )
    try:
        with temporary_settings({PREFECT_API_URL: api}), get_client(sync_client=True) as client:
            _wait_for(lambda: client.api_healthcheck() is None)
            client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(name=TRAINING_LIMIT, limit=1))
            ensure_crash_automation()
            ensure_crash_automation()
            yield client
    finally:
        server.terminate()
        server.wait()


@contextmanager
def _serving(folder: Path, client: SyncPrefectClient) -> Iterator[psutil.Process]:
    with (folder / "serve.log").open("a") as log:
        runner = subprocess.Popen(
            [sys.executable, str(folder / "served.py")],
            cwd=folder,
            env=_environment(folder, str(client.api_url).rstrip("/")),
            stdout=log,
            stderr=log,
        )
    try:
        yield psutil.Process(runner.pid)
    finally:
        with suppress(psutil.NoSuchProcess):
            for process in [*psutil.Process(runner.pid).children(recursive=True), runner]:
                process.kill()
        runner.wait()


def _start(folder: Path, client: SyncPrefectClient, name: str) -> Any:
    def deployment() -> Any:
        with suppress(Exception):
            return client.read_deployment_by_name("until-trained/here")

    parameters = {"config": str(folder / "config.toml"), "name": name}
    return client.create_flow_run_from_deployment(_wait_for(deployment).id, parameters=parameters).id


def _wait_for_state(client: SyncPrefectClient, flow_run_id: Any, *names: str, seconds: float = DEADLINE) -> None:
    _wait_for(lambda: client.read_flow_run(flow_run_id).state_name in names, seconds)


def _wait_until_stuck(folder: Path, name: str) -> None:
    output = folder / "storage" / "runs" / name / "training.partial" / "output.log"
    _wait_for(lambda: output.exists() and "stuck" in output.read_text())


def _of_training(runner: psutil.Process) -> list[psutil.Process]:
    """All that a served flow run has started, the processes of the training among them."""
    processes = runner.children(recursive=True)
    assert any("grpo_core.train" in " ".join(process.cmdline()) for process in processes)
    return processes


def _slots_taken(client: SyncPrefectClient) -> int:
    from tasks.train import TRAINING_LIMIT

    return client.read_global_concurrency_limit_by_name(TRAINING_LIMIT).active_slots


def _result(folder: Path, name: str) -> tuple[dict[str, Any], list[dict[str, float]]]:
    training = folder / "storage" / "runs" / name / "training"
    lines = [json.loads(line) for line in (training / "metrics.jsonl").read_text().splitlines()]
    metrics = [{key: value for key, value in line.items() if "time" not in key} for line in lines]
    return json.loads((training / "result.json").read_text()), metrics


def _tracked_status(folder: Path, training: str) -> str:
    from mlflow import MlflowClient

    run_id = (folder / "storage" / "runs" / training / "mlflow_run_id").read_text()
    return MlflowClient(f"sqlite:///{folder / 'storage' / 'mlflow' / 'mlflow.db'}").get_run(run_id).info.status


@pytest.fixture(scope="module")
def undisturbed(folder: Path, client: SyncPrefectClient) -> list[dict[str, float]]:
    (folder / "go-on").touch()
    with _serving(folder, client):
        flow_run = _start(folder, client, "undisturbed")
        _wait_for_state(client, flow_run, "Completed", "Failed", "Crashed")
    (folder / "go-on").unlink()
    shown = {artifact.key for artifact in client.read_artifacts() if artifact.flow_run_id == flow_run}
    assert {"training-progress", "training-live", "training-curves"} <= shown
    return _result(folder, "undisturbed")[1]


def test_a_cancelled_training_saves_ends_and_goes_on_from_there(
    folder: Path, client: SyncPrefectClient, undisturbed: list[dict[str, float]]
) -> None:
    with _serving(folder, client) as runner:
        cancelled = _start(folder, client, "cancelled")
        _wait_until_stuck(folder, "cancelled")
        waiting = _start(folder, client, "waiting")
        _wait_for(
            lambda: any("waiting: all slots" in log.message for log in client.read_logs() if log.flow_run_id == waiting)
        )
        processes = [p for p in _of_training(runner) if "cancelled" in " ".join(p.cmdline())]
        client.set_flow_run_state(cancelled, Cancelling())
        assert not psutil.wait_procs(processes, timeout=CANCEL_SECONDS)[1]
        _wait_for_state(client, cancelled, "Cancelled")
        partial = folder / "storage" / "runs" / "cancelled" / "training.partial"
        assert [path.name for path in (partial / "checkpoints").iterdir()] == ["step-000003"]
        assert "told to stop, the checkpoint of step 3" in (partial / "output.log").read_text()
        assert _tracked_status(folder, "cancelled/training.partial") == "KILLED"

        _wait_until_stuck(folder, "waiting")  # it got the slot
        client.set_flow_run_state(waiting, Cancelling())
        _wait_for_state(client, waiting, "Cancelled")
        _wait_for(lambda: _slots_taken(client) == 0)

        (folder / "go-on").touch()
        _wait_for_state(client, _start(folder, client, "cancelled"), "Completed", "Failed", "Crashed")
        (folder / "go-on").unlink()
    result, metrics = _result(folder, "cancelled")
    assert result["resumed_at_step"] == 3
    assert metrics == undisturbed
    assert _tracked_status(folder, "cancelled/training") == "FINISHED"


def test_a_run_killed_with_its_runner_is_shown_as_crashed_and_its_retry_goes_on(
    folder: Path, client: SyncPrefectClient, undisturbed: list[dict[str, float]]
) -> None:
    with _serving(folder, client) as runner:
        flow_run = _start(folder, client, "killed")
        _wait_until_stuck(folder, "killed")
        processes = _of_training(runner)
        (flow_process,) = (child for child in runner.children() if child.children())  # beside multiprocessing's tracker
        for process in (runner, flow_process):
            process.send_signal(signal.SIGKILL)
        assert not psutil.wait_procs(processes, timeout=CANCEL_SECONDS)[1]
    _wait_for_state(client, flow_run, "Crashed", seconds=200)
    _wait_for(lambda: _slots_taken(client) == 0)

    (folder / "go-on").touch()
    with _serving(folder, client):
        client.set_flow_run_state(flow_run, Scheduled(name="AwaitingRetry"), force=True)
        _wait_for_state(client, flow_run, "Completed", "Failed")
    (folder / "go-on").unlink()
    result, metrics = _result(folder, "killed")
    assert result["resumed_at_step"] == 3
    assert metrics == undisturbed
    of_it = TaskRunFilter(flow_run_id=TaskRunFilterFlowRunId(any_=[flow_run]))
    states = sorted(t.state_name for t in client.read_task_runs(task_run_filter=of_it) if t.name.startswith("train"))
    assert states == ["Completed", "Crashed"]
