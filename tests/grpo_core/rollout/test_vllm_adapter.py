"""A vLLM server gets an adapter alone, and the base again if it was given other weights; for real, on the CPU."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any
from unittest import mock

import httpx2
import pytest
import torch

from grpo_core.config.files import parse_config
from grpo_core.config.inputs import ModelConfig
from grpo_core.errors import EngineError
from grpo_core.rollout.vllm import binary
from grpo_core.rollout.vllm import serve as vllm_serve
from grpo_core.rollout.vllm import server_engine as vllm_server
from grpo_core.rollout.vllm.adapter import sends_adapter_alone, supported_rank
from grpo_core.rollout.vllm.client import Weights
from grpo_core.rollout.vllm.router import Router
from tests import forked
from tests.conftest import config_values, make_model, make_run
from tests.grpo_core.rollout.pretend_vllm import output
from tests.grpo_core.rollout.test_vllm_client import STARTED, make_server, make_transfer
from tests.grpo_core.rollout.vllm_engine import PACKED, plain_logprobs
from tests.serving import free_ports, policy_server

pytestmark = pytest.mark.served

PROBES = [[3, 4, 5, 6, 7], [8, 9], [5] * 20]


def follow(run: Path, port: int, in_4bit: bool) -> dict[str, Any]:
    """How far a server's log-probabilities are from the model's after each hand-over, and what each brought."""
    from grpo_core.config.files import load_config
    from grpo_core.model.loading import load_model, trainable_state, with_adapter
    from grpo_core.rollout.vllm import send_weights
    from grpo_core.rollout.vllm.server_engine import VLLMServerEngine

    config = load_config(run / "config.toml")
    base, other = load_model(config.model.name_or_path, in_4bit=in_4bit), load_model(config.model.name_or_path)
    model = with_adapter(base, config.model)
    found: dict[str, Any] = {"drift": {}, "how": [], "bytes": []}
    parts = send_weights._send_adapter

    def counted(server: Any, weights: Any, transfer: Any) -> Any:
        found["bytes"].append(sum(tensor.nbytes for tensor in weights.snapshot.values()))
        return parts(server, weights, transfer)

    send_weights._send_adapter = counted

    def drift(engine: Any, model: Any, name: str) -> None:
        rows = zip(engine.compute_logprobs(PROBES), (plain_logprobs(model, ids) for ids in PROBES), strict=True)
        found["drift"][name] = max(abs(a - b) for row in rows for a, b in zip(*row, strict=True))

    with policy_server(run / "config.toml", port, run / "server.log"):
        engine = VLLMServerEngine(config, model, 32)
        drift(engine, model, "fresh")
        for number in range(2):
            before = [plain_logprobs(model, ids) for ids in PROBES]
            for tensor in trainable_state(model).values():
                torch.nn.init.normal_(tensor, std=0.1)
            moved = zip(before, (plain_logprobs(model, ids) for ids in PROBES), strict=True)
            assert max(abs(a - b) for row in moved for a, b in zip(*row, strict=True)) > 0.1
            found["how"].append(engine.sync_weights(model))
            drift(engine, model, f"update {number}")
        engine.close()
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
        engine = VLLMServerEngine(config, other, 32)  # as an evaluation has it
        drift(engine, other, "whole weights")
        engine.close()
        engine = VLLMServerEngine(config, model, 32)
        drift(engine, model, "after whole weights")
    with policy_server(run / "config.toml", port, run / "server.log"):
        drift(engine, model, "started again")
        engine.close()
    found["adapter"] = sum(tensor.nbytes for tensor in trainable_state(model).values())
    return found


@pytest.mark.e2e
@pytest.mark.parametrize(("transfer", "in_4bit"), [("shared_memory", False), ("http", False), ("shared_memory", True)])
def test_a_server_follows_an_adapter_over_its_own_base_through_all_that_it_suffers(
    tmp_path: Path, transfer: str, in_4bit: bool
) -> None:
    """Or over the weights that a base of 4 bits stands for."""
    model = make_model(tmp_path / "model", tie_word_embeddings=True, initializer_range=0.1, **PACKED)
    (port,) = free_ports(1)
    keys = {"use_peft": True, "lora_r": 5, "lora_alpha": 15, "use_rslora": True, "vllm_server_timeout": 600.0}
    keys["load_in_4bit"] = in_4bit
    keys |= {"vllm_weight_transfer": transfer, "vllm_server_base_urls": [f"http://127.0.0.1:{port}"]}
    run = make_run(tmp_path / "run", config_values(model, tmp_path, engine="vllm-server", **keys))
    found = forked.call(follow, run, port, in_4bit)
    assert found["how"] == [f"adapter sent by {transfer}"] * 2
    assert max(found["drift"].values()) < 1e-4, found["drift"]
    assert len(found["drift"]) == 6
    assert found["bytes"] == [found["adapter"]] * 5


def follow_merged(run: Path, port: int) -> list[float]:
    """How far a server's log-probabilities are from those of a model under an adapter after each hand-over."""
    from grpo_core.config.files import load_config
    from grpo_core.model.loading import load_model, trainable_state, with_adapter
    from grpo_core.rollout.vllm.server_engine import VLLMServerEngine

    config = load_config(run / "config.toml")
    model, found = with_adapter(load_model(config.model.name_or_path), config.model), list[float]()
    with policy_server(run / "config.toml", port, run / "server.log"):
        engine = VLLMServerEngine(config, model, 32)
        for number in range(3):
            rows = zip(engine.compute_logprobs(PROBES), (plain_logprobs(model, ids) for ids in PROBES), strict=True)
            found.append(max(abs(a - b) for row in rows for a, b in zip(*row, strict=True)))
            torch.manual_seed(number)
            for tensor in trainable_state(model).values():
                tensor += 0.05 * torch.randn_like(tensor)
            engine.sync_weights(model)
        engine.close()
    return found


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("architecture", "keys"),
    [("Mixtral", {}), ("Qwen3Moe", {}), ("Qwen2", {"lora_modules_to_save": ["embed_tokens", "lm_head"]})],
)
def test_a_server_gets_whole_weights_where_vllm_takes_no_adapter(
    tmp_path: Path, architecture: str, keys: dict[str, Any]
) -> None:
    """Those of a mixture of experts by the names, and in the layout, that vLLM reads."""
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 32}
    options = {**PACKED, **(experts if architecture != "Qwen2" else {})}
    model = make_model(tmp_path / "model", architecture, initializer_range=0.1, **options)
    (port,) = free_ports(1)
    keys = {**keys, "use_peft": True, "lora_r": 5, "lora_alpha": 15, "vllm_server_timeout": 600.0}
    keys |= {"vllm_server_base_urls": [f"http://127.0.0.1:{port}"]}
    run = make_run(tmp_path / "run", config_values(model, tmp_path, engine="vllm-server", **keys))
    assert max(forked.call(follow_merged, run, port)) < 1e-4


@pytest.mark.parametrize(
    ("architecture", "keys", "room"),
    [
        ("Qwen2", {}, 0),
        ("Qwen2", {"use_peft": True}, 16),
        ("Qwen2", {"use_peft": True, "lora_r": 20}, 32),
        ("Qwen3Moe", {"use_peft": True}, 0),  # the weights, merged
        ("Qwen2", {"use_peft": True, "lora_modules_to_save": ["embed_tokens"]}, 0),
    ],
)
def test_a_server_makes_room_for_the_adapter_or_is_refused(
    tmp_path: Path, architecture: str, keys: dict[str, Any], room: int
) -> None:
    shape = {"num_experts": 4, "num_experts_per_tok": 2, "head_dim": 32} if architecture == "Qwen3Moe" else {}
    folder = make_model(tmp_path / "model", architecture, **shape)
    config = parse_config(config_values(folder, tmp_path, engine="vllm-server", **keys))
    assert vllm_serve.max_adapter_rank(config) == room
    command = vllm_serve.server_command(config)
    assert ("--enable-lora" in command) == bool(room)
    assert not room or command[command.index("--max-lora-rank") + 1] == str(room)
    for rank in (0, 8, 16, 32):
        said = vllm_server._objection({**STARTED, "lora_rank": rank}, config, 16, True, "there", room)
        assert bool(said) == (rank < room)
        assert not said or ("takes no adapters" if rank == 0 else f"adapters of rank {rank} at most") in said


def test_the_room_for_adapters_is_the_next_that_vllm_knows() -> None:
    assert [supported_rank(rank) for rank in (1, 8, 9, 300, 512)] == [8, 8, 16, 320, 512]


def test_an_adapter_of_a_higher_rank_than_vllm_knows_is_merged_before_it_is_sent(model_folder: Path) -> None:
    config = ModelConfig(name_or_path=str(model_folder), use_peft=True, lora_r=512)
    assert sends_adapter_alone(config)
    assert not sends_adapter_alone(config.model_copy(update={"lora_r": 513}))


@pytest.mark.parametrize(
    ("found", "has_base"),
    [("default", True), ("a-7-over-base", True), ("a-7", False), ("none", False)],
)
def test_an_adapter_goes_to_a_server_alone_if_it_has_the_base_that_it_was_started_with(
    found: str, has_base: bool
) -> None:
    """A server that an evaluation or another training gave whole weights gets the base first."""
    sent: list[Weights] = []
    transfer, server = make_transfer(), make_server("http://127.0.0.1:1")
    base = {"weight": torch.zeros(1)}
    adapter = Weights("b-1-over-base", {"lora_A": torch.zeros(1)}, {"r": 4}, lambda: base)
    server.wanted = adapter

    async def control(method: str, path: str, **options: Any) -> Any:
        return {"weight_version": found}

    with mock.patch.object(server, "control", control), mock.patch.object(server, "_receive", mock.AsyncMock()):
        asyncio.run(server.bring_up_to_date())
    assert server.has_base == has_base
    server.transfer = transfer.Transfer(server)
    server.transfer.lost_weights = lambda sent: []
    engine = server.transfer.engine = mock.Mock(send_weights=lambda: sent.append(engine.source.snapshot))
    with mock.patch.object(transfer, "_send_adapter", lambda server, weights, way: sent.append(weights.snapshot) or {}):
        transfer.Sender().send(server, adapter)
    assert sent == [base, adapter.snapshot][has_base:]
    server.has_base = False
    with pytest.raises(EngineError, match="the base of a sharded model is not sent to servers; start it again"):
        transfer.Sender().send(server, Weights("b-1-over-base", adapter.snapshot, {"r": 4}))


def test_a_server_that_is_started_again_and_does_not_know_the_adapter_yet_is_waited_for() -> None:
    server = make_server("http://127.0.0.1:1")
    missing = httpx2.Response(503, text="no adapter 'policy'")
    whole = binary.encode([output("token-1", [5])])
    answers = [missing, httpx2.Response(200, content=whole)]
    asked: list[Any] = []

    async def request(method: str, path: str, **options: Any) -> Any:
        asked.append(options["json"]["model"])
        return answers.pop(0)

    async def ask() -> Any:
        with mock.patch.object(server.http, "request", request), mock.patch.object(server, "restore", restore):
            router = Router([server], 60.0, 0, reports=False, sender=mock.Mock())
            return await router.complete({"token_ids": [1], "model": "policy"}, 1)

    restore = mock.AsyncMock()
    assert asyncio.run(ask()) == binary.decode(whole)
    assert (asked, restore.await_count) == (["policy", "policy"], 1)
