"""Servers that a stage starts: on which GPUs, and what is said when one does not come up."""

from __future__ import annotations

import errno
import logging
import socket
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_core.config.files import load_config, parse_config
from grpo_core.rollout.vllm.secret import SECRET
from grpo_core.rollout.vllm.serve import own_gpus
from tasks.processes.vllm_servers import Place, _Server, _stop, hold_port, servers
from tasks.stages.errors import StageError
from tasks.stages.run import Context
from tests.conftest import config_values, make_run, with_keys


@pytest.fixture
def values(tmp_path: Path) -> dict[str, Any]:
    return config_values(tmp_path / "no-model", tmp_path, engine="vllm-server")


def test_too_few_gpus_are_refused_with_the_keys_that_ask_for_them(
    values: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(SystemExit, match=r"has 4 GPUs; 2 are taken .*, and this vLLM server needs 4 \("):
        own_gpus(parse_config(with_keys(values, num_processes=2, vllm_tensor_parallel_size=4)), 2)
    found = own_gpus(parse_config(with_keys(values, num_processes=2, vllm_tensor_parallel_size=2)), 2)
    assert found == {"CUDA_VISIBLE_DEVICES": "2,3"}
    own_gpus(parse_config(with_keys(values, vllm_tensor_parallel_size=4)), 0)


def test_a_gpu_behind_one_that_cuda_does_not_know_is_no_server_s(
    values: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,9,1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # as torch counts where there is no GPU 9
    with pytest.raises(SystemExit, match=r"has 1 GPUs; 1 are taken"):
        own_gpus(parse_config(values), 1)
    assert own_gpus(parse_config(values), 0) == {"CUDA_VISIBLE_DEVICES": "0"}


def test_a_held_port_is_given_to_nothing_else_and_a_server_can_listen_on_it_twice() -> None:
    with hold_port() as held:
        address = held.getsockname()
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(address)
        for _ in range(2):
            with socket.create_server(address), socket.create_connection(address):  # which sets SO_REUSEADDR
                pass


class Stage:
    """Stands for what starts a server: what runs is `command`, which ends immediately."""

    def __init__(self, folder: Path):
        self.held, self.announced = hold_port(), threading.Event()
        self.url = f"http://127.0.0.1:{self.held.getsockname()[1]}"
        self.place = Place("", self.url, ["-c", ""], 1.0, folder / "server.log")
        self.server = _Server(lambda: self.place, {SECRET: "right"}, logging.getLogger(), self.announced.set)


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Stage]:
    monkeypatch.setattr(_Server, "_start", lambda self, place: subprocess.Popen(["true"]))
    monkeypatch.setattr("tasks.processes.vllm_servers.PAUSE_SECONDS", 0.0)
    made = Stage(tmp_path)
    yield made
    _stop([made.server])
    made.held.close()


@pytest.mark.slow
@pytest.mark.parametrize("reason", [OSError(errno.ENOSPC, "No space left on device"), StageError("no host answers")])
def test_a_server_that_cannot_be_started_again_immediately_is_tried_again(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, reason: Exception
) -> None:
    failures = iter([reason])

    def start(self: _Server, place: Place) -> subprocess.Popen[bytes]:
        for failure in failures:
            raise failure
        return subprocess.Popen(["sleep", "600"])

    monkeypatch.setattr(_Server, "_start", start)
    monkeypatch.setattr(_Server, "_is_up", lambda self: True)
    stage.server.watch.start()
    assert stage.announced.wait(30)
    assert f"cannot be started again: {reason}" in caplog.text


def test_a_stages_server_is_asked_whether_it_is_up_with_the_secret_and_through_no_proxy(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # where nothing answers
    for variable in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(variable, raising=False)

    class Healthy(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.headers["Authorization"] == "Bearer right" else 401)
            self.end_headers()

    assert not stage.server._is_up()
    with HTTPServer(stage.held.getsockname(), Healthy) as healthy:
        thread = threading.Thread(target=healthy.handle_request)
        thread.start()
        assert stage.server._is_up()
        thread.join()


@pytest.mark.e2e
def test_a_server_that_does_not_come_up_fails_the_stage_with_its_last_lines(
    values: dict[str, Any], tmp_path: Path
) -> None:
    run = make_run(tmp_path / "run", values)
    context = Context(load_config(run / "config.toml"), run, run)
    with (
        pytest.raises(StageError, match=r"ended with status \d+ before it was up(.|\n)*no-model"),
        servers(context, logging.getLogger()),
    ):
        raise AssertionError("nothing is served")


def test_a_run_that_names_its_servers_or_needs_none_has_none_started(values: dict[str, Any], tmp_path: Path) -> None:
    named = with_keys(values, vllm_server_base_urls=["http://127.0.0.1:1"])
    for each in (named, with_keys(values, engine="transformers")):
        with servers(Context(parse_config(each), tmp_path, tmp_path), logging.getLogger()) as environment:
            assert environment == {}
