"""A vLLM server, for real on the CPU, gets an adapter alone, and the base again where it was given other weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests import forked
from tests.conftest import config_values, make_model, make_run
from tests.grpo_core.rollout.vllm_engine import PACKED, plain_logprobs
from tests.serving import free_ports, policy_server

pytestmark = pytest.mark.e2e

PROBES = [[3, 4, 5, 6, 7], [8, 9], [5] * 20]


def follow(run: Path, port: int) -> dict[str, Any]:
    """How far a server's log-probabilities are from the model's after each hand-over, and what each brought."""
    import torch

    from grpo_core.config.files import load_config
    from grpo_core.model.loading import load_model, trainable_state, with_adapter
    from grpo_core.rollout.vllm import transfer
    from grpo_core.rollout.vllm.server import VLLMServerEngine

    config = load_config(run / "config.toml")
    model, other = (
        with_adapter(load_model(config.model.name_or_path), config.model),
        load_model(config.model.name_or_path),
    )
    found: dict[str, Any] = {"drift": {}, "how": [], "bytes": []}
    parts = transfer._send_adapter

    def counted(server: Any, version: str, settings: Any, tensors: Any) -> None:
        found["bytes"].append(sum(tensor.nbytes for tensor in tensors.values()))
        parts(server, version, settings, tensors)

    transfer._send_adapter = counted

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


@pytest.mark.parametrize("transfer", ["shared_memory", "http"])
def test_a_server_follows_an_adapter_over_its_own_base_through_all_that_it_suffers(
    tmp_path: Path, transfer: str
) -> None:
    model = make_model(tmp_path / "model", tie_word_embeddings=True, initializer_range=0.1, **PACKED)
    (port,) = free_ports(1)
    keys = {"use_peft": True, "lora_r": 5, "lora_alpha": 15, "use_rslora": True, "vllm_server_timeout": 600.0}
    keys |= {"vllm_weight_transfer": transfer, "vllm_server_base_urls": [f"http://127.0.0.1:{port}"]}
    run = make_run(tmp_path / "run", config_values(model, tmp_path, engine="vllm-server", **keys))
    found = forked.call(follow, run, port)
    assert found["how"] == [f"adapter sent by {transfer}"] * 2
    assert max(found["drift"].values()) < 1e-4, found["drift"]
    assert len(found["drift"]) == 6
    assert found["bytes"] == [found["adapter"]] * 5
