"""A worker of a work pool that is told to end while it trains: the flow run goes on by itself in the next worker."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from benchmarks.command import python_path
from tests.conftest import config_values, write_sums
from tests.e2e.test_cancel import (
    PROJECT,
    _processes,
    _states,
    _wait_until_ended,
    _wait_until_stuck,
    _write_config,
)
from tests.e2e.test_kill import REWARD
from tests.served.test_deployments import _new_pool, _prefect
from tests.serving import Served, prefect_server

pytestmark = pytest.mark.e2e


@contextmanager
def _worker(server: Served) -> Iterator[psutil.Popen]:
    command = [sys.executable, "-m", "flows.cli.main", "worker", "gpu"]
    with (server.storage / "worker.log").open("ab") as output:
        worker = psutil.Popen(command, env=server.environment, stdout=output, stderr=subprocess.STDOUT)
    try:
        yield worker
    finally:
        with suppress(psutil.NoSuchProcess):  # the test may have ended it
            worker.terminate()
        worker.wait()


def test_the_next_worker_goes_on_with_what_a_stopped_one_was_training(tmp_path: Path, model_folder: Path) -> None:
    (tmp_path / "patience.py").write_text(REWARD)
    write_sums(tmp_path / "train.parquet", 10, 34)
    write_sums(tmp_path / "eval.parquet", 60, 76)
    _write_config(tmp_path, "stopped", config_values(model_folder, tmp_path, max_steps=6, save_steps=100))
    path = python_path(tmp_path, PROJECT)
    with prefect_server(tmp_path, PYTHONPATH=path, MAY_GO_ON=str(tmp_path / "go-on")) as server:
        pools = [_new_pool(pool, "process", "process-job.json") for pool in ("cpu", "gpu")]
        _prefect(server, *pools, ["deploy", "--all"])
        for stage in ("validate", "plan"):
            command = [sys.executable, "-m", "flows.cli.main", "stage", stage, "--run", "stopped"]
            subprocess.run(command, env=server.environment, check=True)
        with _worker(server) as worker:
            run_id = server.trigger("train/gpu", run="stopped")
            _wait_until_stuck(server, "stopped")
            trained_by = _processes(worker, "stopped")
            worker.terminate()
            _wait_until_ended(trained_by)
            worker.wait()
        assert server.wait(run_id, "SCHEDULED")["state"]["message"] == "train was interrupted, 3 of 6 updates saved"
        (tmp_path / "go-on").touch()
        with _worker(server):
            assert server.wait(run_id)["state_name"] == "Completed", server.messages(run_id)
        attempt = ["Pending", "Running"]
        assert _states(server, run_id) == [*attempt, "AwaitingRetry", *attempt, "Completed"]
    result = json.loads((tmp_path / "runs" / "stopped" / "training" / "result.json").read_text())
    assert result["resumed_at_step"] == 3
