"""A training, here or on a host, whose real vLLM server is on another host, by ssh: whatever happens to that, it goes
on or names the host, and leaves nothing there."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.command import python_path
from grpo_core.config.files import dump_config, parse_config
from tests.conftest import config_values, make_model, make_run
from tests.e2e.hosts import Host, some_hosts
from tests.e2e.place import PROJECT, Started, metrics
from tests.grpo_core.rollout.vllm_engine import PACKED
from tests.processes import wait_for

pytestmark = pytest.mark.e2e

LIMIT_SECONDS = 90.0  # in which everything on a host has ended once it is on its own

# Stands still in its second and third rollout until there is a file of that number, or it is told to stop.
REWARD = """
import os, time
from grpo_core.training import interrupt
calls = []
def patient(completions, completion_ids):
    calls.append(1)
    go_on = os.path.join(os.environ["MAY_GO_ON"], str(len(calls)))
    if len(calls) in (2, 3) and not os.path.exists(go_on):
        print("stuck at", len(calls), flush=True)
        while not os.path.exists(go_on) and not interrupt._told.to_stop:
            time.sleep(0.05)
    return [float(ids[0] % 2) for ids in completion_ids]
"""


class Place:
    """Two hosts, and a training that stands still."""

    def __init__(self, folder: Path, hosts: list[Host], environment: dict[str, str]):
        self.folder, self.hosts = folder, hosts
        (folder / "patience.py").write_text(REWARD)
        path = python_path(folder, PROJECT)
        self.environment = {**environment, "PYTHONPATH": path, "MAY_GO_ON": str(folder)}
        model = make_model(folder / "model", tie_word_embeddings=True, initializer_range=0.1, **PACKED)
        values = config_values(model, folder, engine="vllm-server", max_steps=4, vllm_server_timeout=600.0)
        self.values = {**values, "rewards": [{"function": "patience:patient"}]}
        make_run(folder / "local", self.values)

    def run(self, name: str, *server_hosts: str, hosts: tuple[str, ...] = (), **rollout: Any) -> Path:
        """A run directory; the training runs on the first of `hosts`, here without."""
        launcher = {"launcher": "ssh", "hosts": list(hosts)} if hosts else {}
        values = {**self.values, "launch": {"server_hosts": list(server_hosts), **launcher}}
        values["rollout"] = {**self.values["rollout"], **rollout}
        shutil.copytree(self.folder / "local", self.folder / name, ignore=shutil.ignore_patterns("training"))
        (self.folder / name / "config.toml").write_text(dump_config(parse_config(values)))
        return self.folder / name

    @contextmanager
    def training(self, run: Path) -> Iterator[Started]:
        stage = Started(self.environment, "tests.e2e.train_on_hosts", run)
        try:
            yield stage
        finally:
            stage.process.kill()
            stage.process.wait()

    def go_on(self, number: int) -> None:
        (self.folder / str(number)).touch()

    def until_ended(self) -> None:
        wait_for(lambda: not any(host.left() for host in self.hosts), LIMIT_SECONDS)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("hosts")
    with some_hosts(folder, "alpha", "beta") as (hosts, environment):
        yield Place(folder, hosts, environment)


@pytest.fixture
def place(shared: Place) -> Iterator[Place]:
    for number in (2, 3):
        (shared.folder / str(number)).unlink(missing_ok=True)
    yield shared
    for host in shared.hosts:
        host.restore()


def test_a_server_on_another_host_is_restarted_there_or_on_a_spare_one_with_the_metrics_of_one_here(
    place: Place,
) -> None:
    alpha, beta = place.hosts
    run = place.run("moved", "beta", "alpha")
    with place.training(run) as stage:
        stage.until("stuck at 2")
        assert not alpha.left()
        [server] = beta.named("-m vllm.entrypoints.openai.api_server")
        server.kill()
        stage.until(r"on beta ended with status 137 \(SIGKILL\) and is started again")
        place.go_on(2)
        stage.until("stuck at 3")
        beta.unplug()
        stage.until("on beta ended with status 254: the connection to it is lost and is started again")
        place.go_on(3)
        assert stage.end() == 0, stage.text
        assert stage.said("is started again at http://.*:"), stage.text
    place.until_ended()
    steps = metrics(run)
    assert all(step["sampling/sync_drift"] < 1e-5 for step in steps)
    assert sorted(file.name for file in (run / "training").glob("vllm-server*")) == [
        "vllm-server-0-alpha.log",
        "vllm-server-0-beta.log",
    ]
    with place.training(place.folder / "local") as stage:
        assert stage.end() == 0, stage.text
    assert steps == metrics(place.folder / "local")  # whose weights went by shared memory


def test_a_host_that_is_cut_off_without_a_spare_one_ends_the_stage_by_name(place: Place) -> None:
    run = place.run("alone", "beta", vllm_server_timeout=150.0)
    with place.training(run) as stage:
        stage.until("stuck at 2")
        place.hosts[1].unplug()
        place.go_on(2)
        assert stage.end() == 1
        assert stage.said(r"ProcessError: the vLLM server at http://\S+ on beta ended with status 254"), stage.text
        assert stage.said("not available for 150 s"), stage.text
    place.until_ended()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_stage_that_is_cancelled_or_killed_leaves_nothing_on_its_hosts(
    place: Place, number: signal.Signals, tmp_path: Path
) -> None:
    run = place.run(number.name, "beta", hosts=("alpha",))
    with place.training(run) as stage:
        stage.until("stuck at 2") if number == signal.SIGINT else wait_for(
            lambda: place.hosts[1].named("vllm.entrypoints.openai.api_server")
        )
        stage.process.send_signal(number)
        assert stage.end() != 0
        if number == signal.SIGINT:
            assert not any(host.left() for host in place.hosts)
            assert stage.said("told to stop, the checkpoint of step 1"), stage.text
    place.until_ended()


# Accepts connections and answers nothing.
SILENT = """
import socket, sys, time
with socket.create_server((sys.argv[1], 4000)) as server:
    print("listening", flush=True)
    held = server.accept()
    print("asked", flush=True)
    time.sleep(600)
"""


def test_an_answer_from_a_host_that_is_cut_off_is_not_waited_for(place: Place) -> None:
    import asyncio
    import threading

    from grpo_core.config.rollout import RolloutConfig
    from grpo_core.rollout.vllm.client import Server, Unavailable

    beta = place.hosts[1]
    command = ["ip", "netns", "exec", beta.namespace, sys.executable, "-c", SILENT, beta.address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as silent:
        assert silent.stdout is not None
        silent.stdout.readline()

        def cut() -> None:
            assert silent.stdout is not None
            silent.stdout.readline()
            beta.unplug()

        threading.Thread(target=cut, daemon=True).start()
        server = Server(
            f"http://{beta.address}:4000", RolloutConfig(), "token", "holder", lambda it: "", lambda *_: None
        )
        with pytest.raises(Unavailable):
            asyncio.run(server._request("POST", "/inference/v1/generate", 600.0, json.loads, json={}))
        silent.kill()
