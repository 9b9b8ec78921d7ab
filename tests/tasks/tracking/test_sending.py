"""What metrics.jsonl has, MLflow has in the end, each figure once, whatever became of its server in between."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import mlflow
import pytest
from mlflow import MlflowClient

from tasks.stages.mlflow_address import tracking_uri
from tasks.tracking import sending as module
from tasks.tracking.sending import SENT_FILE, send_rest, sending
from tests.processes import wait_for
from tests.serving import free_ports, kill_group, mlflow_server

LOG = logging.getLogger("sending")
PATIENCE = 120  # seconds


def _rows(steps: Sequence[int], first: float = 1000.0) -> list[dict[str, float]]:
    """Some figures, of which no two steps have the same; `first`: the timestamp of the first row."""
    return [
        {"step": step, "reward": step / 7, "kl": 1e-9 * step, "num_tokens": 10 * step, "timestamp": first + place}
        for place, step in enumerate(steps)
    ]


def _append(folder: Path, rows: Sequence[dict[str, float]]) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def _in_mlflow(run_id: str) -> dict[str, list[tuple[int, float]]]:
    """(step, value) of each figure of training, in MLflow's order."""
    client = MlflowClient()
    names = [name for name in client.get_run(run_id).data.metrics if not name.startswith("system/")]
    return {name: [(m.step, m.value) for m in client.get_metric_history(run_id, name)] for name in names}


def _in_file(folder: Path) -> dict[str, list[tuple[int, float]]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {name: [(row["step"], row[name]) for row in rows] for name in ("reward", "kl", "num_tokens")}


def _sent(folder: Path) -> float:
    return float((folder / SENT_FILE).read_text()) if (folder / SENT_FILE).exists() else 0.0


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory, embed_mlflow: Callable[[Path], None]) -> Path:
    """Holds MLflow's SQLite file."""
    storage = tmp_path_factory.mktemp("storage")
    embed_mlflow(storage)
    return storage / "mlflow"


@pytest.fixture
def run(database: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """A run in it, as `sending` is told of it."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{database / 'mlflow.db'}")
    yield _new_run()
    mlflow.set_tracking_uri(None)


def _new_run() -> dict[str, Any]:
    mlflow.set_tracking_uri(tracking_uri())
    info = MlflowClient().create_run("0").info
    return {"run_id": info.run_id, "experiment_id": "0", "start_time": info.start_time}


@pytest.mark.e2e
def test_a_server_that_is_killed_and_comes_back_has_every_figure_once(
    database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    [port] = free_ports(1)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{port}")
    monkeypatch.setattr(module, "SECONDS_BETWEEN_SENDINGS", 0.05)
    monkeypatch.setattr(module, "SECONDS_BETWEEN_MEASUREMENTS", 0.5)
    monkeypatch.setattr(module, "LAST_SECONDS", PATIENCE)
    with ExitStack() as stack:
        server = stack.enter_context(mlflow_server(database, port))
        tracked = _new_run()
        with sending(tmp_path, tracked, LOG):
            _append(tmp_path, _rows(range(1, 101)))
            wait_for(lambda: _sent(tmp_path) > 0)
            _append(tmp_path, _rows(range(101, 201), 2000.0))
            kill_group(server)
            _append(tmp_path, _rows(range(201, 301), 3000.0))
            wait_for(lambda: "does not accept the figures" in caplog.text)
            stack.enter_context(mlflow_server(database, port))
            _append(tmp_path, _rows(range(301, 401), 4000.0))
        assert _in_mlflow(tracked["run_id"]) == _in_file(tmp_path)
        run = MlflowClient().get_run(tracked["run_id"])
        assert run.info.status == "FINISHED"
        assert "system/cpu_utilization_percentage" in run.data.metrics
    assert "MLflow answers again" in caplog.text
    [warning] = [it.getMessage() for it in caplog.records if it.levelno >= logging.WARNING]
    assert warning.startswith("MLflow does not accept the figures; trying again: ")
    mlflow.set_tracking_uri(None)


@pytest.mark.slow
def test_what_a_dead_server_did_not_take_waits_for_who_comes_next(
    database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The end of the training waits no longer than it may; here the database comes to life after it."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{free_ports(1)[0]}")
    monkeypatch.setattr(module, "SECONDS_BETWEEN_SENDINGS", 0.05)
    monkeypatch.setattr(module, "LAST_SECONDS", 0.5)
    _append(tmp_path, _rows(range(1, 61)))
    before = dict(os.environ)
    with sending(tmp_path, {"run_id": "0" * 32, "start_time": 0}, LOG):
        pass
    assert "lacks the figures of 60 updates" in caplog.text
    assert dict(os.environ) == before
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{database / 'mlflow.db'}")
    run_id = _new_run()["run_id"]
    send_rest(MlflowClient(), run_id, tmp_path, LOG)
    assert _in_mlflow(run_id) == _in_file(tmp_path)
    mlflow.set_tracking_uri(None)


@pytest.mark.slow
@pytest.mark.parametrize(("raised", "status"), [(ValueError, "FAILED"), (KeyboardInterrupt, "KILLED")])
def test_how_a_training_ended_is_in_mlflow_until_an_attempt_goes_on(
    run: dict[str, Any], tmp_path: Path, raised: type[BaseException], status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CANCELLED_SECONDS", PATIENCE)
    with pytest.raises(raised), sending(tmp_path, run, LOG):
        _append(tmp_path, _rows([1, 2]))
        raise raised
    assert MlflowClient().get_run(run["run_id"]).info.status == status
    with sending(tmp_path, run, LOG):
        wait_for(lambda: MlflowClient().get_run(run["run_id"]).info.status == "RUNNING")
        _append(tmp_path, _rows([3], 2000.0))
    assert MlflowClient().get_run(run["run_id"]).info.status == "FINISHED"
    assert _in_mlflow(run["run_id"]) == _in_file(tmp_path)


@pytest.mark.slow
def test_sending_all_again_changes_nothing_and_the_log_says_how_far_it_is(
    run: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(module, "ROWS_BETWEEN_LINES", 50)
    _append(tmp_path, _rows(range(1, 80)))
    for _ in range(2):
        caplog.clear()
        send_rest(MlflowClient(), run["run_id"], tmp_path, LOG)
        assert _in_mlflow(run["run_id"]) == _in_file(tmp_path)
        assert caplog.messages == [f"MLflow has {done} of the last 79 updates: sending the others" for done in (0, 50)]
        (tmp_path / SENT_FILE).write_text("")  # as a machine that dies may leave it


@pytest.mark.slow
def test_a_continued_training_makes_no_database_where_it_is_started(
    database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLflow does where it is asked before it is told where its database is."""
    storage, here = tmp_path / "storage", tmp_path / "here"
    (storage / "mlflow").mkdir(parents=True)
    shutil.copy(database / "mlflow.db", storage / "mlflow")
    monkeypatch.setenv("GRPO_STORAGE", str(storage))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    mlflow.set_tracking_uri(None)
    info = MlflowClient(tracking_uri()).create_run("0").info
    here.mkdir()
    monkeypatch.chdir(here)
    with sending(tmp_path, {"run_id": info.run_id, "start_time": info.start_time}, LOG):
        _append(tmp_path, _rows([1]))
    assert _in_mlflow(info.run_id) == _in_file(tmp_path)
    assert list(here.iterdir()) == []
    mlflow.set_tracking_uri(None)


@pytest.mark.slow
def test_of_an_update_that_was_done_again_mlflow_shows_the_newer_figures(run: dict[str, Any], tmp_path: Path) -> None:
    """Some of the updates that are done again had been sent, some had not."""
    run_id = run["run_id"]
    _append(tmp_path, _rows([1, 2, 3]))
    send_rest(MlflowClient(), run_id, tmp_path, LOG)
    kept = _rows([1, 2, 3])[:1]
    again = [{**row, "reward": -row["reward"]} for row in _rows([2, 3, 4], 2000.0)]
    written = tmp_path / "metrics.tmp"
    written.write_text("".join(json.dumps(row) + "\n" for row in [*kept, *again[:2]]))
    written.rename(tmp_path / "metrics.jsonl")
    send_rest(MlflowClient(), run_id, tmp_path, LOG)
    assert MlflowClient().get_run(run_id).data.metrics["reward"] == -3 / 7
    _append(tmp_path, again[2:])
    send_rest(MlflowClient(), run_id, tmp_path, LOG)
    assert dict(_in_mlflow(run_id)["reward"]) == dict(_in_file(tmp_path)["reward"])  # the last of a step counts
