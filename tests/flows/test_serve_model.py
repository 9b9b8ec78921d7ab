"""The proxy in front of a model's servers, with stand-ins for vLLM: what it fills in, refuses, and does at a change."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest
from typer.testing import CliRunner

from benchmarks.command import ROOT, python_path
from flows.cli.main import app
from flows.serving import model_proxy, model_server
from flows.serving.children import start_child
from flows.serving.model_check import check_served
from flows.serving.model_proxy import Front, run_front
from flows.serving.model_server import Server, Version, as_evaluated, start_server
from grpo_core.config.files import load_config
from grpo_core.rollout.vllm.logprobs import HEAD
from grpo_core.rollout.vllm.secret import SECRET
from grpo_core.system.tables import read_parquet
from tasks.registry.judging import Recorded
from tests.conftest import check_may_serve
from tests.processes import wait_for
from tests.serving import free_ports
from tests.tasks.registry.evaluated import evaluated_run, make_version, reward_change, served_version

SAMPLING = {"max_tokens": 8, "temperature": 0.0, "top_p": 1.0, "top_k": 0, "stop": ["\n"]}
SETTINGS = {"system_prompt": "Be brief.", "template": json.dumps({"enable_thinking": False}), "precision": "no"}


def version(number: str, **settings: Any) -> Version:
    return Version("sums", number, Path(), SAMPLING, {**SETTINGS, **settings})


def test_a_request_has_what_the_evaluation_had_unless_it_says_otherwise() -> None:
    assert as_evaluated(version("1"), {"prompt": "1+1="}) == {"prompt": "1+1=", **SAMPLING}
    asked = {"prompt": "1+1=", "max_completion_tokens": 3, "temperature": 1.0, "stop": []}
    found = as_evaluated(version("1"), asked)
    assert found == {**asked, "top_p": 1.0, "top_k": 0}
    user = {"role": "user", "content": "1+1"}
    found = as_evaluated(version("1"), {"messages": [user]})
    assert found["messages"] == [{"role": "system", "content": "Be brief."}, user]
    assert found["chat_template_kwargs"] == {"enable_thinking": False}
    own = {
        "messages": [{"role": "system", "content": "Be long."}, user],
        "chat_template_kwargs": {"enable_thinking": True},
    }
    found = as_evaluated(version("1"), own)
    assert {key: found[key] for key in own} == own
    nothing = dict.fromkeys((*SAMPLING, "max_completion_tokens", "chat_template_kwargs"))
    assert as_evaluated(version("1"), {"prompt": "1+1=", **nothing}) == {"prompt": "1+1=", **SAMPLING}
    for wrong in ({"messages": "1+1"}, {"messages": ["1+1"]}, {"messages": [user], "chat_template_kwargs": "x"}):
        assert as_evaluated(version("1"), wrong) == {**SAMPLING, **wrong}
    tools = [{"type": "function", "function": {"name": "add"}}]
    shown = as_evaluated(version("1", template=json.dumps({"tools": tools})), {"messages": [user]})
    assert (shown["tools"], shown["tool_choice"]) == (tools, "none")


class Serving:
    """A front in a thread of its own. `wanted`: the number of the version to serve."""

    def __init__(self, folder: Path, **options: Any):
        check_may_serve()
        [self.port] = free_ports(1)
        self.folder, self.wanted, self.said, self.servers, self.asked = folder, "1", list[str](), list[Server](), 0
        self.front = Front(self.start, self.to_serve, self.said.append, **options)
        self.url = f"http://127.0.0.1:{self.port}"
        self.client = httpx2.Client(base_url=self.url, timeout=60)

    def start(self, of: Version) -> Server:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            port = listening.getsockname()[1]
        log = self.folder / f"{of.number}.log"
        module, environment = (
            ["tests.stand_in_model", of.number, str(port)],
            {**os.environ, "PYTHONPATH": python_path(ROOT), SECRET: "own"},
        )
        child = start_child(f"version {of.number}", module, 5, log, environment)
        self.servers.append(Server(of, f"http://127.0.0.1:{port}", child, "own"))
        return self.servers[-1]

    def to_serve(self, current: Server | None) -> Version | None:
        self.asked += 1
        if self.wanted == "gone":
            raise OSError("the disk is full")
        return None if current and current.version.number == self.wanted else version(self.wanted)

    def served_by(self, **asked: Any) -> str:
        answer = self.client.post("/v1/completions", json={"prompt": "1", **asked})
        return answer.raise_for_status().json()["served_by"]


@contextmanager
def running(serving: Serving) -> Iterator[Serving]:
    task: Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[None]]] = Future()
    ended: Future[None] = Future()

    async def serve() -> None:
        task.set_result((asyncio.get_running_loop(), asyncio.current_task()))
        await run_front(serving.front, "127.0.0.1", serving.port)

    def run() -> None:
        try:
            asyncio.run(serve())
        except BaseException as error:
            ended.set_exception(error)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_proxy, "ASK_SECONDS", 0.1)
        thread = threading.Thread(target=run)
        thread.start()
        try:
            wait_for(lambda: serving.front.is_ready.is_set() or not thread.is_alive(), 300)
            assert not ended.done(), ended.exception()
            yield serving
        finally:
            loop, serving_task = task.result()
            loop.call_soon_threadsafe(serving_task.cancel)
            thread.join()
    assert all(server.child.process.poll() is not None for server in serving.servers)


@pytest.mark.served
@pytest.mark.parametrize("restart", [False, True])
def test_a_change_of_the_version_under_load_loses_no_request(tmp_path: Path, restart: bool) -> None:
    serving = Serving(tmp_path, restart=restart)
    with running(serving), ThreadPoolExecutor(8) as clients:
        found = [clients.submit(serving.served_by, seconds=0.01) for _ in range(100)]
        wait_for(lambda: sum(each.done() for each in found) > 50)
        serving.wanted = "2"
        while (last := clients.submit(serving.served_by, seconds=0.01).result()) != "2":
            found += [clients.submit(serving.served_by, seconds=0.01) for _ in range(100)]
        assert last == "2"
        assert {each.result() for each in found} <= {"1", "2"}
        assert found[0].result() == "1"
        wait_for(lambda: serving.servers[0].child.process.poll() is not None)
        assert httpx2.get(f"{serving.url}/health").json() == {"status": "ready", "model": "sums", "version": "2"}
    assert "serving sums version 2" in serving.said


@pytest.mark.served
def test_a_version_whose_server_does_not_start_leaves_the_old_one_serving(tmp_path: Path) -> None:
    serving = Serving(tmp_path)
    with running(serving):
        serving.wanted = "broken"
        wait_for(lambda: any("is served as before" in text for text in serving.said))
        assert serving.served_by() == "1"
        assert any("RuntimeError: no memory is left" in text for text in serving.said)
        assert [each.version.number for each in serving.servers] == ["1", "broken", "broken", "1"]
        asked = serving.asked
        wait_for(lambda: serving.asked > asked + 3)
        assert len(serving.servers) == 4  # it is not tried for ever
        serving.wanted = "2"
        wait_for(lambda: serving.front.current and serving.front.current.version.number == "2")
        assert serving.served_by() == "2"


@pytest.mark.served
def test_a_server_that_dies_is_started_again_though_nobody_says_which_version(tmp_path: Path) -> None:
    serving = Serving(tmp_path)
    with running(serving):
        serving.wanted = "gone"
        wait_for(lambda: "the disk is full. Version 1 is served as before" in serving.said)
        [server] = psutil.Process(serving.servers[0].child.process.pid).children()
        server.kill()
        wait_for(lambda: len(serving.servers) == 2)
        assert serving.served_by() == "1"
    assert serving.said.count("the disk is full. Version 1 is served as before") <= 2


@pytest.mark.served
def test_only_what_completes_and_describes_is_passed_on_to_this_server_alone(tmp_path: Path) -> None:
    serving = Serving(tmp_path)
    [elsewhere] = free_ports(1)
    with running(serving), socket.create_server(("127.0.0.1", elsewhere)) as other:
        for path in (f"//127.0.0.1:{elsewhere}/v1/completions", "/v1/responses", "/sleep", "/v1/completions/../load"):
            with socket.create_connection(("127.0.0.1", serving.port)) as raw:
                raw.sendall(
                    f"POST {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{{}}".encode()
                )
                assert b"".join(iter(lambda: raw.recv(4096), b"")).startswith(b"HTTP/1.1 404"), path
        other.setblocking(False)
        with pytest.raises(BlockingIOError):
            other.accept()


@pytest.mark.served
def test_a_promotion_is_followed_while_an_old_request_still_runs(tmp_path: Path) -> None:
    serving = Serving(tmp_path)
    with running(serving), ThreadPoolExecutor(1) as client:
        slow = client.submit(serving.served_by, until=str(tmp_path / "answer"))
        wait_for(lambda: serving.servers[0].in_flight == 1)
        for number in ("2", "3"):
            serving.wanted = number
            wait_for(lambda number=number: serving.front.current.version.number == number)
        assert not slow.done()
        (tmp_path / "answer").touch()
        assert slow.result() == "1"


@pytest.mark.served
def test_answers_come_in_parts_and_a_client_that_goes_away_is_not_waited_for(tmp_path: Path) -> None:
    serving = Serving(tmp_path, key="secret")
    header = {"Authorization": "Bearer secret"}
    with running(serving):
        for wrong in ({}, {"Authorization": "Bearer other"}):
            assert httpx2.post(f"{serving.url}/v1/completions", json={}, headers=wrong).status_code == 401
        asked = {"json": {"prompt": "1", "stream": True}, "headers": header}
        with httpx2.stream("POST", f"{serving.url}/v1/completions", **asked) as answer:
            assert "".join(answer.iter_text()) == "data: 1 0\n\ndata: 1 1\n\ndata: 1 2\n\n"
        asked["json"] |= {"until": str(tmp_path / "never")}
        with httpx2.stream("POST", f"{serving.url}/v1/completions", **asked) as answer:
            next(answer.iter_text())
        wait_for(lambda: serving.servers[0].in_flight == 0, 20)
        with suppress(httpx2.ReadTimeout):
            httpx2.post(f"{serving.url}/v1/completions", json={"until": "never"}, headers=header, timeout=0.2)
        wait_for(lambda: serving.servers[0].in_flight == 0, 20)
        long = httpx2.post(
            f"{serving.url}/v1/completions", json={"prompt": "1" * 3_000_000}, headers=header, timeout=60
        )
        assert len(long.json()["asked"]["prompt"]) == 3_000_000
        with httpx2.stream("POST", f"{serving.url}/v1/completions", **asked) as answer:
            parts = answer.iter_text()
            next(parts)
            [server] = psutil.Process(serving.servers[0].child.process.pid).children()
            server.kill()
            with pytest.raises(httpx2.TransportError):  # half an answer does not look like a whole one
                list(parts)


@pytest.mark.served
def test_without_vllm_the_version_s_own_code_answers_as_evaluated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = evaluated_run(tmp_path, conversational=True)
    found = served_version(run, make_version(run, tmp_path / "version"))
    monkeypatch.setenv("GRPO_STORAGE", str(tmp_path))
    monkeypatch.setattr(model_server, "has_vllm", lambda: False)
    serving = Serving(tmp_path)
    serving.front.start, serving.front.wanted = partial(start_server, options=[]), lambda current: found
    config = load_config(run / "config.toml").model_dump(mode="json", exclude_unset=True)
    recorded = Recorded(config, {}, read_parquet(run / "evaluation" / "samples.parquet"))
    with running(serving):
        agreement = check_served(serving.url, "", found, recorded)
        with httpx2.Client(base_url=serving.url, timeout=60) as client:
            [model] = client.get("/v1/models").json()["data"]
            streamed = client.post("/v1/chat/completions", json={"messages": [], "stream": True})
            broken = client.post("/v1/chat/completions", content="[")
            other = client.post("/v1/chat/completions", json={"model": "products"})
        assert serving.front.current
        around = httpx2.post(f"{serving.front.current.url}/v1/chat/completions", json={})
        serving.front.current.version = replace(found, sampling={**found.sampling, "stop": []})
        without_folder = check_served(serving.url, "", found, recorded)
        (tmp_path / "runs").mkdir()
        run.rename(kept := tmp_path / "runs" / "test")
        lost_stop = check_served(serving.url, "", found, recorded)
    assert lost_stop.differing == without_folder.differing and len(lost_stop.differing) == 16 - lost_stop.equal > 0
    assert (without_folder.reward_change, lost_stop.reward_change) == (
        None,
        pytest.approx(reward_change(kept, lost_stop)),
    )
    assert (agreement.compared, agreement.equal, agreement.reward_change) == (16, 16, 0.0)
    assert (model["id"], around.status_code) == ("sums", 401)
    refused = {"stream = True needs vLLM": streamed, "line 1": broken, "'products' is not served": other}
    for said, answer in refused.items():
        assert (answer.status_code, said in answer.json()["error"]["message"]) == (400, True), answer.text


def test_vllm_has_the_logits_of_evaluations_and_a_secret_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRPO_STORAGE", str(tmp_path))
    monkeypatch.setenv(SECRET, "of trainings")
    monkeypatch.setattr(model_server, "has_vllm", lambda: True)
    started: list[Any] = []
    monkeypatch.setattr(model_server, "start_child", lambda *asked, **_: started.append(asked))
    servers = [start_server(version("1"), ["--seed", "1"]) for _ in range(2)]
    assert len({server.secret for server in servers} | {"of trainings", ""}) == 4
    for server, (_, module, _, _, environment) in zip(servers, started, strict=True):
        assert json.loads(module[module.index("--hf-overrides") + 1]) == HEAD
        assert module[module.index("--middleware") + 1].endswith(".SecretRequired")
        assert environment[SECRET] == server.secret
        assert module[-2:] == ["--seed", "1"]  # a person's options win


@pytest.mark.parametrize(
    ("words", "key", "said"),
    [
        (["sums"], "", "'sums': give a version after an @, such as sums@champion"),
        (["sums@1", "--host", "0.0.0.0"], "", "set a key in $GRPO_MODEL_KEY"),
        (["sums@1"], "ключ", "has characters that no header can have"),
        (["sums@1", "--host", "::"], "", "set a key in $GRPO_MODEL_KEY"),
        (["sums@1", "--host", "::1"], "", "sums@1: no such version"),
        (["sums@1", "--", "--port=1"], "", "--port after -- is not vLLM's here"),
        (["sums@champion"], "", "sums@champion: no such version; `grpo promote sums` makes the champion"),
    ],
)
def test_what_cannot_be_served_is_refused_in_a_sentence(
    words: list[str], key: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, embed_mlflow: Any
) -> None:
    embed_mlflow(tmp_path / "storage")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GRPO_STORAGE", str(tmp_path / "storage"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("GRPO_MODEL_KEY", key)
    [port] = free_ports(1)
    done = CliRunner().invoke(app, ["serve-model", "--port", str(port), *words])
    assert (done.exit_code, done.stdout) == (2, "")
    assert said in " ".join(done.stderr.split())
