"""What a plan forecasts of the weights' way to vLLM servers on GPUs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from grpo_core.config.files import parse_config
from grpo_core.config.run import RunConfig
from grpo_core.errors import ConfigError
from grpo_core.planning.forecast import communication, forecast
from grpo_core.planning.hardware import Gpu, named_gpu
from grpo_core.planning.memory import GIB, peak_memory
from grpo_core.planning.shapes import PromptLengths, adapter_parameters
from tests.conftest import config_values
from tests.qwen import QWEN, planned, qwen

LENGTHS = PromptLengths(256.0, 256, "given")
ELSEWHERE = {"server_hosts": [f"gpu-{number}" for number in range(64)]}
SHARDED = {"sharding": "full", "num_processes": 16}
MIXTURE = {"model_type": "qwen3_moe", "num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 768}


def _config(servers: int = 1, launch: Mapping[str, Any] = {}, model: str = "model", **keys: Any) -> RunConfig:
    keys = {"engine": "vllm-server", "vllm_num_servers": servers, "mixed_precision": "bf16", **keys}
    return parse_config({**config_values(Path(model), Path("data"), **keys), "launch": {**launch}})


def _found(size: str, **keys: Any) -> tuple[float, float, float]:
    """Bytes per update to servers, the seconds that they add, and bytes of the buffers."""
    run = planned(_config(**keys), qwen(size), LENGTHS, Gpu("GPU", 80.0))
    without = planned(_config(**keys | {"vllm_weight_transfer": "http"}), qwen(size), LENGTHS, run.gpu)
    found = communication(run, 1)
    seconds = found["seconds_per_update"] - communication(without, 1)["seconds_per_update"]
    buffers = peak_memory(run)["parts_gib"]["sending_buffers"]
    return found["parts_gib"]["to_servers"] * GIB, seconds, buffers * GIB


def test_one_copy_of_the_weights_leaves_the_sender_whatever_the_number_of_servers() -> None:
    parameters, embedding = qwen("32B").parameters, 152_064 * 5120
    for servers in (1, 8, 64):
        sent, seconds, buffers = _found("32B", servers=servers, launch=ELSEWHERE)
        assert sent == pytest.approx(2 * parameters)  # 65.5 GB
        assert seconds == pytest.approx(2 * parameters / 25e9)
        assert buffers == pytest.approx(2 * (2**29 + 2 * embedding))
    sent, seconds, _ = _found("32B")
    assert seconds == pytest.approx(2 * parameters / 300e9), "on this machine"
    sent, seconds, buffers = _found("32B", launch=ELSEWHERE, **SHARDED)
    assert sent == pytest.approx(2 * parameters)
    assert seconds == pytest.approx(4 * parameters / 25e9), "it comes from the host's memory, and goes out"
    assert buffers == pytest.approx(3 * (2**29 + 2 * embedding))


def test_each_server_gets_an_adapter_for_which_there_are_no_buffers() -> None:
    lora = {"use_peft": True, "lora_r": 16}
    adapter = adapter_parameters(qwen("7B"), _config(**lora))
    sent, seconds, buffers = _found("7B", servers=8, launch=ELSEWHERE, **lora)
    assert (sent, buffers) == (pytest.approx(2 * 8 * adapter), 0)
    assert seconds == pytest.approx(sent / 25e9)
    assert _found("7B", **lora, load_in_4bit=True)[2] > 0, "it gets what the 4 bits stand for first"


def test_buffers_are_no_larger_than_the_model_and_take_turns_with_the_training() -> None:
    small = peak_memory(planned(_config(), qwen("0.5B"), LENGTHS, Gpu("GPU", 80.0)))["parts_gib"]
    assert small["sending_buffers"] * GIB <= 2 * 2 * qwen("0.5B").parameters
    keys = {"sharding": "full", "num_processes": 64, "per_device_train_batch_size": 1, "gradient_checkpointing": True}
    short = PromptLengths(8.0, 8, "given")
    found = peak_memory(planned(_config(launch=ELSEWHERE, **keys), qwen("32B"), short, Gpu("GPU", 80.0)))
    parts = dict(found["parts_gib"])
    held = sum(parts.pop(name) for name in ("weights", "optimizer", "reference", "teacher", "bf16_copy"))
    held += parts.pop("engine_weights")
    buffers, turns = parts.pop("sending_buffers"), [parts.pop("kv_cache"), parts.pop("merged_base")]
    assert found["peak_memory_gib"] == pytest.approx(held + max(sum(parts.values()), buffers, *turns))
    assert "buffers that weights go to servers from" in found["how"]


@pytest.mark.parametrize("experts", [False, True])
def test_an_adapter_that_goes_alone_needs_no_machine_that_holds_the_whole_model(experts: bool, tmp_path: Path) -> None:
    values = QWEN["7B"] if not experts else QWEN["7B"] | MIXTURE
    (tmp_path / "config.json").write_text(json.dumps(values))
    launch = {**ELSEWHERE, "launcher": "ssh", "hosts": ["a", "b"]}
    config = _config(1, launch, str(tmp_path), use_peft=True, num_machines=2, **SHARDED)
    plan = planned(config, qwen("7B"), LENGTHS, named_gpu("H100")).plan
    for gpu in (named_gpu("H100"), None):
        if experts:
            with pytest.raises(ConfigError, match=r"this adapter \(model.lora_r=\d+, of experts\) goes .* merged"):
                forecast(config, plan, LENGTHS, "not measured", [], gpu)
        else:
            assert "error" not in forecast(config, plan, LENGTHS, "not measured", [], gpu).get("memory", {})
