"""Two storages and strangers on one machine: `grpo up` and the commands beside it use their own servers alone."""

from __future__ import annotations

import fcntl
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TextIO

import psutil
import pytest

from flows.serving.find_server import find_api_to_serve, wait_until_healthy
from flows.serving.up_file import ServerError, announced, find_up, new_up
from tests.conftest import config_values, make_run
from tests.serving import STOP_SECONDS, Served, free_ports, serving

VERSIONS = """
from tests.evaluations import fixed_samples, register_version
for right in (40, 45):
    register_version("sums", fixed_samples({"base": [0] * 50, "trained": [1] * right + [0] * (50 - right)}))
"""
PROJECT = Path(__file__).parents[2]


def _grpo(storage: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PREFECT_", "MLFLOW_"))}
    return subprocess.run(
        [sys.executable, "-m", "flows.cli.main", *arguments],
        env={**kept, "GRPO_STORAGE": str(storage), **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


def _up(storage: Path, prefect_port: int | str, mlflow_port: int | str) -> subprocess.CompletedProcess[str]:
    return _grpo(storage, "up", "--prefect-port", str(prefect_port), "--mlflow-port", str(mlflow_port))


@contextmanager
def _stranger() -> Iterator[int]:
    """Port of a web server of this machine that has nothing to do with Prefect, and answers every request."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        try:
            yield server.server_port
        finally:
            server.shutdown()


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A storage with two versions of the model "sums": the first right on 80 % of the prompts, the second on 90 %."""
    storage = tmp_path_factory.mktemp("ours")
    environment = {**os.environ, "GRPO_STORAGE": str(storage), "PYTHONPATH": str(PROJECT)}
    subprocess.run([sys.executable, "-c", VERSIONS], cwd=storage, env=environment, check=True, capture_output=True)
    return storage


@pytest.fixture(scope="module")
def served(storage: Path) -> Iterator[Served]:
    with serving(storage) as served:
        yield served


def _ports(served: Served) -> list[str]:
    return [url.rsplit(":", 1)[1] for url in (served.prefect_url, served.mlflow_url)]


@pytest.mark.e2e
def test_promoting_and_rolling_back_need_no_server_and_say_one_sentence(storage: Path) -> None:
    for arguments, status, said in [
        (("promote", "sums", "--version", "1"), 0, "sums version 1: promoted: accuracy on held-out 80.0% against 0.0%"),
        (("rollback", "sums"), 2, "sums has had no champion before version 1"),
    ]:
        done = _grpo(storage, *arguments)
        assert (done.returncode, (done.stdout + done.stderr).startswith(said)) == (status, True), done
        assert len((done.stdout + done.stderr).splitlines()) == 1
    assert not list((storage / "prefect").iterdir()), "no server was started"


@pytest.mark.slow
def test_the_terminal_shows_the_addresses_and_what_is_served_and_nothing_else(served: Served) -> None:
    lines = served.log.read_text().splitlines()
    assert [line.split(" /")[0].split(" pipeline")[0] for line in lines] == [
        "Starting Prefect and MLflow over",
        f"Prefect  {served.prefect_url}  ready; writes to",
        f"MLflow   {served.mlflow_url}  ready; writes to",
        "Serving",
        f"Ready: start a run at {served.prefect_url}/deployments. Ctrl-C ends all of it.",
    ]
    for line in lines[1:3]:
        assert Path(line.split("writes to ")[1]).is_file()


@pytest.mark.slow
def test_a_second_up_on_a_taken_port_is_refused_before_anything_starts(served: Served, tmp_path: Path) -> None:
    prefect_port, mlflow_port = _ports(served)
    free = str(free_ports(1)[0])
    for ports, taken in [((prefect_port, free), prefect_port), ((free, mlflow_port), mlflow_port)]:
        refused = _up(tmp_path, *ports)
        assert (refused.returncode, refused.stdout) == (2, "")
        assert f"-port {taken}: the port is taken by a server of grpo over another storage, {served.storage}" in (
            refused.stderr
        )
        assert "Nothing was started. Ports that are free: --prefect-port " in refused.stderr
    assert not (tmp_path / "mlflow").exists()
    assert not list((tmp_path / "prefect").iterdir())


@pytest.mark.slow
def test_a_second_up_of_one_storage_is_refused_on_other_ports_too(served: Served) -> None:
    refused = _up(served.storage, *free_ports(2))
    assert refused.returncode == 2
    assert f"is served already at {served.prefect_url} and {served.mlflow_url}, by `grpo up`" in refused.stderr
    assert f"(process {served.process.pid} of " in refused.stderr


@pytest.mark.slow
def test_serving_another_storage_s_server_is_refused(served: Served, tmp_path: Path) -> None:
    api = served.environment["PREFECT_API_URL"]
    for command in (["serve"], ["worker", "cpu"]):
        refused = _grpo(tmp_path, *command, PREFECT_API_URL=api)
        assert refused.returncode == 2
        assert f"is of the storage {served.storage}, and this is {tmp_path}" in refused.stderr


@pytest.mark.slow
def test_commands_join_the_server_of_their_storage(served: Served) -> None:
    refused = _grpo(served.storage, "promote", "sums", "--set", "promotion.min_gain=0.95")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr.startswith("sums version 2: refused: ")
    assert len(refused.stderr.splitlines()) == 1
    [run] = served.filter("flow_runs")
    assert (run["name"], run["state_name"], run["tags"]) == ("sums-candidate-promote", "Refused", ["grpo"])


@pytest.mark.slow
def test_when_a_server_ends_everything_does_and_it_says_which(served: Served) -> None:  # the last one: they are gone
    up = psutil.Process(served.process.pid)
    started = up.children(recursive=True)
    [mlflow] = [it for it in started if "mlflow.server.fastapi_app:app" in it.cmdline()]
    mlflow.send_signal(signal.SIGKILL)
    assert served.process.wait(STOP_SECONDS) == 1
    assert not psutil.wait_procs(started, STOP_SECONDS)[1]
    said = served.log.read_text()
    assert "MLflow's server has ended, with status " in said
    assert f"everything else is ended too. It wrote to {served.storage / 'mlflow' / 'server.log'}:" in said
    assert (served.storage / "up.json").read_text() == ""


@pytest.mark.slow
def test_a_stranger_on_the_port_is_named_and_nothing_starts(tmp_path: Path) -> None:
    with _stranger() as port:
        refused = _up(tmp_path, port, free_ports(1)[0])
    assert (refused.returncode, refused.stdout) == (2, "")
    assert f"--prefect-port {port}: the port is taken by process {os.getpid()} of " in refused.stderr
    assert not (tmp_path / "mlflow").exists()


def test_a_stranger_that_answers_is_not_taken_for_the_server_that_was_started() -> None:
    asked = iter([True, True, False])  # the own server ends, since the port is taken
    with _stranger() as port:
        assert not wait_until_healthy(f"http://127.0.0.1:{port}/api", "own", lambda: next(asked))
    assert next(asked, None) is None


def test_an_up_that_has_ended_is_not_found_whatever_its_file_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRPO_STORAGE", str(tmp_path))
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    up = new_up("http://127.0.0.1:1", "http://127.0.0.1:2")
    with announced(up):
        assert find_up() == up
        left = (tmp_path / "up.json").read_text()
    (tmp_path / "up.json").write_text(left)  # as after SIGKILL
    assert find_up() is None
    with pytest.raises(ServerError, match=r"no `grpo up` serves .*set PREFECT_API_URL"):
        find_api_to_serve()


def test_an_up_starts_while_another_command_looks_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRPO_STORAGE", str(tmp_path))
    flock = fcntl.flock
    with (tmp_path / "up.json").open("w") as looking:
        flock(looking, fcntl.LOCK_SH)

        def try_then_stop_looking(file: TextIO, operation: int) -> None:
            try:
                flock(file, operation)
            finally:
                flock(looking, fcntl.LOCK_UN)

        monkeypatch.setattr(fcntl, "flock", try_then_stop_looking)
        up = new_up("http://127.0.0.1:1", "http://127.0.0.1:2")
        with announced(up):
            assert find_up() == up


def test_a_file_of_another_version_or_a_folder_is_no_known_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRPO_STORAGE", str(tmp_path))
    with announced(new_up("http://127.0.0.1:1", "http://127.0.0.1:2")):
        (tmp_path / "up.json").write_text('{"url": "http://127.0.0.1:1"}')
        assert find_up() is None
    (tmp_path / "up.json").unlink()
    (tmp_path / "up.json").mkdir()
    assert find_up() is None
    with (
        pytest.raises(ServerError, match=r"up.json cannot be written .Is a directory.: move it away"),
        announced(new_up("http://127.0.0.1:1", "http://127.0.0.1:2")),
    ):
        pass


@pytest.mark.e2e
def test_a_command_s_own_server_has_the_limit_of_one_training_before_the_first_run(tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "test", config_values(tmp_path / "model", tmp_path))
    refused = _grpo(tmp_path, "stage", "validate", "--run", "test")
    assert refused.returncode == 1
    with closing(sqlite3.connect(tmp_path / "prefect" / "prefect.db")) as database:
        assert database.execute('select name, "limit" from concurrency_limit_v2').fetchall() == [("grpo-training", 1)]
