"""HTTP servers that answer what a training asks of vLLM's, without a model: a completion's ids follow from its prompt
and seed. They can be killed, frozen and started again."""

from __future__ import annotations

import json
import random
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from grpo_core.config.files import parse_config
from grpo_core.rollout.vllm import binary
from grpo_core.rollout.vllm import client as vllm_client
from grpo_core.rollout.vllm import router as vllm_router
from grpo_core.rollout.vllm import server_engine as vllm_server
from grpo_core.rollout.vllm.server_engine import VLLMServerEngine
from tests.conftest import config_values
from tests.held import held

STARTED = {
    "weight_transfer": "shared_memory",
    "dtype": "float32",
    "head_dtype": "float32",
    "logprobs_mode": "processed_logprobs",
    "max_model_len": 512,
    "lora_rank": 0,
    "max_num_seqs": 128,
    "chunked_prefill": False,
    "scheduling_policy": "priority",
    "pid_namespace_id": "here",
}


def plain_ids(prompt: Sequence[int], seed: int, count: int) -> list[int]:
    """The completion that every server gives."""
    draw = random.Random(hash((*prompt, seed)))
    return [draw.randrange(3, 1000) for _ in range(count)]


class Pretended:
    """One server; `open` holds back its completions while it is not set, `answering` everything, and `held` the answers
    at these paths. One that is `broken` answers all but requests for completions; `arrived` gets each path."""

    def __init__(self, max_num_seqs: int = 128):
        self.started: dict[str, Any] = {**STARTED, "max_num_seqs": max_num_seqs}
        self.asked: list[list[int]] = []  # prompts of completions
        self.changed = threading.Condition()
        self.open, self.answering = threading.Event(), threading.Event()
        self.open.set()
        self.port, self.broken = 0, False
        self.held = set[str]()
        self.arrived: Callable[[str], object] = lambda path: None
        self.sampled, self.most = 0, 0  # completions concurrently: now, and the most that there were
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self.version, self.owner, self.weights = "default", "", torch.zeros(1)
        self.resumed = threading.Event()
        self.resumed.set()
        self.answering.set()
        self.life = life = threading.Event()  # set when it is dead
        self.server = _Server(("127.0.0.1", self.port), _handler(self, life))
        self.port = self.server.server_port
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def kill(self) -> None:
        """End it. Requests that are not answered yet lose their connection."""
        self.life.set()
        self.server.shutdown()
        self.server.server_close()

    def wait_for(self, count: int) -> None:
        """Until it has been asked for so many completions."""
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.asked) >= count, 60), (len(self.asked), count)

    def answer(self, path: str, body: dict[str, Any]) -> Any:
        if path == "/collective_rpc" and body["method"] == "take_lease":
            self.owner = self.owner or body["args"][0]
            granted = self.owner == body["args"][0]
            return {
                "results": [{"granted": granted, "holder": self.owner, "seconds": 0.0, "server": self.started}],
            }
        if path == "/collective_rpc" and body["method"] == "lost_weights":
            return {"results": [[]]}
        if path == "/collective_rpc" and body["method"] == "end_weight_update":
            return {"results": [1]}
        if path == "/get_world_size":
            return {"world_size": 1}
        if path == "/weight_info":
            return {"weight_version": self.version}
        if path == "/pause":
            self.resumed.clear()
        if path == "/resume":
            self.resumed.set()
        if path == "/update_weight_version":
            self.version = body["new_version"]
        if path == "/inference/v1/generate":
            scores = [None, *({str(token): {"logprob": -float(self.weights)}} for token in body["token_ids"][1:])]
            spans = [{"version": self.version, "start": 0, "end": 1}]
            return {"choices": [{"finish_reason": "stop", "weight_versions": spans}], "prompt_logprobs": scores}
        return self.complete(body) if path == binary.PATH else {}

    def complete(self, body: dict[str, Any]) -> bytes:
        life, prompt, asked = self.life, body["token_ids"], body["sampling_params"]
        with self.changed:
            self.asked.append(prompt)
            self.sampled += 1
            self.most = max(self.most, self.sampled)
            self.changed.notify_all()
        while not (self.open.wait(0.01) and self.resumed.wait(0.01)) and not life.is_set():
            pass
        with self.changed:
            self.sampled -= 1
        return binary.encode([output(self.version, plain_ids(prompt, asked["seed"], asked["max_tokens"]))])


def output(version: str, ids: list[int]) -> Any:
    """What vLLM's engine gives for a completion."""
    return SimpleNamespace(
        token_ids=ids,
        logprobs=SimpleNamespace(logprobs=[-1.0] * len(ids), start_indices=[*range(len(ids))]),
        finish_reason="length",
        weight_versions=[Span(version, 0, len(ids))],
    )


@dataclass
class Span:
    """vLLM's WeightVersionSpan."""

    version: str
    start: int
    end: int


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256


def _handler(pretended: Pretended, life: threading.Event) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
            path = self.path.partition("?")[0]
            pretended.arrived(path)
            try:
                answer, status = pretended.answer(path, body), 200
            except RuntimeError as error:  # of a worker: as vLLM says it
                answer, status = {"error": {"message": f"Call to collective_rpc method failed: {error}"}}, 500
            found = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            while (path in pretended.held or not pretended.answering.is_set()) and not life.is_set():
                life.wait(0.01)
            if not life.is_set() and not (pretended.broken and path == binary.PATH):
                self.send_response(status)
                self.send_header("Content-Length", str(len(found)))
                self.end_headers()
                self.wfile.write(found)

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            pass

    return Handler


@contextmanager
def pretended(*max_num_seqs: int) -> Iterator[list[Pretended]]:
    servers = [Pretended(count) for count in max_num_seqs]
    yield servers
    for server in servers:
        if not server.life.is_set():
            server.kill()


@contextmanager
def connected(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    servers: Sequence[Pretended],
    model: Any,
    sender: Any = None,
    **keys: Any,
) -> Iterator[VLLMServerEngine]:
    """An engine over these servers, to which weights go by a call or a `sender`; it looks after them often."""
    monkeypatch.setattr(vllm_client, "LEASE_SECONDS", 0.2)
    monkeypatch.setattr(vllm_router, "POLL_SECONDS", 0.01)
    by_url = {server.url: server for server in servers}

    def give(server: vllm_client.Server, weights: vllm_client.Weights) -> None:
        assert weights.snapshot is not None
        if by_url[server.url].life.is_set():
            raise vllm_client.Unavailable("it died when it was to get weights")
        by_url[server.url].weights = weights.snapshot["weight"].flatten()[0].clone()

    vllm = {
        "shared_memory": mock.Mock(pid_namespace_id=lambda: "here", parts=lambda weights, _: [dict(weights)]),
        "over_http": mock.Mock(),
        "send_weights": mock.Mock(Sender=sender or (lambda: mock.Mock(send=give))),
    }
    keys = {"vllm_server_base_urls": [*by_url], "vllm_server_timeout": 60.0, **keys}
    values = config_values(folder, folder, engine="vllm-server", **keys)
    modules = {f"grpo_core.rollout.vllm.{name}": module for name, module in vllm.items()}
    with held(sys.modules, modules, ours="grpo_core."), mock.patch.object(vllm_server, "wrong_vllm", str):
        engine = VLLMServerEngine(parse_config(values), model, 512)
    yield engine
    engine.close()


Serving = Callable[..., AbstractContextManager[tuple[list[Pretended], VLLMServerEngine]]]
