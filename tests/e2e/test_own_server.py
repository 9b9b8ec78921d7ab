"""What befalls the Prefect server that a command starts for itself, and the disks of both databases: a run ends as one
that nothing happened to, at once or when the same command is given again."""

from __future__ import annotations

import hashlib
import json
import re
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import tomli_w

from benchmarks.command import python_path
from tasks.stages import table
from tests.conftest import config_values
from tests.e2e.holding import FUNCTION, write_held
from tests.e2e.place import metrics
from tests.processes import wait_for, with_variables, words
from tests.serving import RUN_SECONDS, plain_environment, prefect_server
from tests.small_disk import fill, small_disk

pytestmark = pytest.mark.e2e

IN_TRAINING = 3  # the rollout in which a training stands still

COMMAND = """
import sys
from flows.serving.environment import configure
configure()
from flows.serving.find_server import server_for_command
with server_for_command():
    import prefect
print("it answers", flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_held(tmp_path_factory.mktemp("inputs"))
    values = config_values(folder / "base", folder)
    values["rewards"] = [{"function": FUNCTION}]
    (folder / "config.toml").write_text(tomli_w.dumps(values))
    return folder


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, inputs: Path) -> dict[str, Any]:
    storage = tmp_path_factory.mktemp("undisturbed")
    assert _run_again(storage, inputs) == (0, True), _said(storage)
    return _result(storage)


@contextmanager
def _command(storage: Path, *arguments: str, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """`python ARGUMENTS…` over this storage, until the body ends."""
    with (storage / "output").open("w") as output:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            env={**plain_environment(), "GRPO_STORAGE": str(storage), **environment},
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@contextmanager
def _run(storage: Path, inputs: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = ("-m", "flows.cli.main", "run", str(inputs / "config.toml"))
    with _command(storage, *command, PYTHONPATH=python_path(inputs)) as process:
        yield process


@contextmanager
def _standing_still(storage: Path, inputs: Path, call: int) -> Iterator[subprocess.Popen[bytes]]:
    """`grpo run` from when its reward stands still in this call of a process, until the body ends."""
    waiting = inputs / "waiting"
    waiting.unlink(missing_ok=True)
    (inputs / "hold").write_text(str(call))
    try:
        with _run(storage, inputs) as process:
            _until(waiting.exists, storage)
            yield process
    finally:
        (inputs / "hold").unlink(missing_ok=True)


def _until_training_stands_still(storage: Path) -> None:
    output = storage / "runs" / "test" / "training.partial" / "output.log"
    _until(lambda: output.exists() and f"still in rollout {IN_TRAINING}" in output.read_text(), storage)


def _until(condition: Callable[[], Any], storage: Path) -> None:
    wait_for(condition, RUN_SECONDS, lambda: _said(storage))


def _ended(process: subprocess.Popen[bytes], storage: Path) -> tuple[int, bool]:
    """Exit status of a command that has ended, and whether it printed no traceback, once nothing of it is left."""
    _until(lambda: process.poll() is not None, storage)
    _until(lambda: not _of(storage), storage)
    return process.wait(), "Traceback" not in _said(storage)


def _run_again(storage: Path, inputs: Path) -> tuple[int, bool]:
    with _run(storage, inputs) as process:
        return _ended(process, storage)


def _said(storage: Path) -> str:
    return (storage / "output").read_text()


def _of(storage: Path) -> list[psutil.Process]:
    """Every process that works over this storage."""
    return with_variables(GRPO_STORAGE=str(storage))


def _servers(storage: Path) -> list[psutil.Process]:
    return [it for it in _of(storage) if words(it)[1:3] == ["-m", "flows.serving.prefect_server"]]


def _kill_server(storage: Path) -> None:
    [server] = _servers(storage)
    server.kill()
    _until(lambda: server not in _servers(storage), storage)


def _result(storage: Path) -> dict[str, Any]:
    """What a run comes to, except times: a training's figures and weights, an evaluation's, and what MLflow has."""
    run = storage / "runs" / "test"
    with closing(sqlite3.connect(storage / "mlflow" / "mlflow.db")) as database:
        versions = database.execute("select name, version from model_versions").fetchall()
        runs = database.execute("select status from runs").fetchall()
        sent = database.execute("select value from metrics where key = 'reward' order by step").fetchall()
    return {
        "metrics": metrics(run),
        "weights": hashlib.sha256((run / "training" / "model" / "model.safetensors").read_bytes()).hexdigest(),
        "evaluation": json.loads((run / "evaluation" / "report.json").read_text())["sets"],
        "mlflow": (versions, runs, sent),
    }


def test_a_server_killed_in_validate_and_in_train_is_started_again_and_nothing_is_lost(
    tmp_path: Path, inputs: Path, undisturbed: dict[str, Any]
) -> None:
    with _standing_still(tmp_path, inputs, 1) as process:
        _kill_server(tmp_path)
        (inputs / "hold").write_text(str(IN_TRAINING))
        _until_training_stands_still(tmp_path)
        _kill_server(tmp_path)
        (inputs / "hold").unlink()
        assert _ended(process, tmp_path) == (0, True), _said(tmp_path)
    said = _said(tmp_path)
    assert said.count("Prefect's server has ended, with status 137 (SIGKILL, as when memory runs out); it is") == 2
    assert said.count(f"it is started again. It writes to {tmp_path / 'prefect' / 'server.log'}") == 2
    assert _result(tmp_path) == undisturbed
    with closing(sqlite3.connect(tmp_path / "prefect" / "prefect.db")) as database:
        assert database.execute("select name, state_type from flow_run").fetchall() == [("test", "COMPLETED")]
        of_tasks = dict(database.execute("select substr(name, 1, length(name) - 4), state_type from task_run"))
        kept = {key for (key,) in database.execute("select key from artifact")}
    assert of_tasks == {stage.name: "COMPLETED" for stage in table.STAGES}
    assert kept >= {"data-report", "plan", "training-progress", "training-curves", "evaluation", "registration"}


def test_full_disks_of_both_databases_are_named_and_the_run_goes_on_once_there_is_room(
    tmp_path: Path, inputs: Path, undisturbed: dict[str, Any]
) -> None:
    prefect, mlflow = tmp_path / "prefect", tmp_path / "mlflow"
    with small_disk(prefect, "24m"), small_disk(mlflow, "24m"):
        with _standing_still(tmp_path, inputs, IN_TRAINING) as process:
            _until_training_stands_still(tmp_path)
            fillers = [fill(prefect), fill(mlflow)]
            (inputs / "hold").unlink()
            assert _ended(process, tmp_path)[0] == 1, _said(tmp_path)  # Prefect logs that its leases are not renewed
        assert _names(tmp_path, prefect / "prefect.db")
        assert (tmp_path / "runs" / "test" / "training" / "result.json").exists()
        fillers[0].unlink()
        assert _run_again(tmp_path, inputs) == (1, True), _said(tmp_path)
        assert _names(tmp_path, mlflow / "mlflow.db")
        fillers[1].unlink()
        assert _run_again(tmp_path, inputs) == (0, True), _said(tmp_path)
        assert _result(tmp_path) == undisturbed


def _names(storage: Path, database: Path) -> bool:
    return f"the disk of the database {database} (" in _said(storage).splitlines()[-1]


def test_a_command_killed_while_its_server_is_started_again_leaves_nothing(tmp_path: Path) -> None:
    with _command(tmp_path, "-c", COMMAND) as process:
        _until(lambda: "it answers" in _said(tmp_path), tmp_path)
        _kill_server(tmp_path)
        _until(lambda: _servers(tmp_path), tmp_path)
        process.kill()
        _until(lambda: not _of(tmp_path), tmp_path)


def test_a_server_that_cannot_be_started_again_says_why_in_one_sentence(tmp_path: Path) -> None:
    with _command(tmp_path, "-c", COMMAND) as process:
        _until(lambda: "it answers" in _said(tmp_path), tmp_path)
        (tmp_path / "prefect" / "prefect.db").write_bytes(b"damaged" * 1000)
        _kill_server(tmp_path)
        _until(lambda: "cannot be started again" in _said(tmp_path), tmp_path)
        process.communicate()
        assert _ended(process, tmp_path) == (0, True), _said(tmp_path)
    assert "Prefect's server cannot be started again, what runs goes on without it: " in _said(tmp_path)
    log = tmp_path / "prefect" / "server.log"
    assert re.search(rf"sqlite3\.DatabaseError\) [\w ]+\. It wrote to {re.escape(str(log))}\n", _said(tmp_path))


def test_a_slot_that_no_lease_holds_is_free_when_the_server_starts_again(tmp_path: Path) -> None:
    limit = "/v2/concurrency_limits/grpo-training"
    with prefect_server(tmp_path) as server:
        made = {"name": "grpo-training", "limit": 2}
        server.api.post("/v2/concurrency_limits/", json=made).raise_for_status()
        for suffix, lease in (("-with-lease", {"lease_duration": 600}), ("", {})):
            taken = {"names": ["grpo-training"], "slots": 1, **lease}
            server.api.post(f"/v2/concurrency_limits/increment{suffix}", json=taken).raise_for_status()
        assert server.get(limit)["active_slots"] == 2
    with prefect_server(tmp_path) as server:
        assert server.get(limit)["active_slots"] == 1
