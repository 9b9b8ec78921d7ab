"""What is forecast of moments that rest in the host's memory: bytes on both sides, seconds, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3MoeConfig

from grpo_core.config.files import parse_config
from grpo_core.config.run import RunConfig
from grpo_core.errors import ConfigError
from grpo_core.planning.forecast import communication, forecast, forecast_rows
from grpo_core.planning.hardware import Gpu, named_gpu
from grpo_core.planning.memory import GIB, MOMENTS, PlannedRun, check_host_memory, peak_memory
from grpo_core.planning.shapes import ModelShape, PromptLengths, adapter_parameters, model_shape
from tests.conftest import config_values
from tests.qwen import QWEN, planned, qwen

LENGTHS = PromptLengths(256, 256, "given")
GPU = Gpu("GPU", 80.0, per_machine=8, host_gib=512.0)
SHARDED = {"sharding": "full", "num_processes": 16, "gradient_accumulation_steps": 1}
EXPERTS = {"num_experts": 8, "moe_intermediate_size": 96, "num_experts_per_tok": 2}


def _config(**keys: Any) -> RunConfig:
    values = {"mixed_precision": "bf16", "engine": "vllm-server", "offload": "optimizer", "max_completion_length": 512}
    return parse_config(config_values(Path("model"), Path("data"), **(values | keys)))


def _run(shape: ModelShape | str = "7B", gpu: Gpu = GPU, **keys: Any) -> PlannedRun:
    return planned(_config(**keys), shape, LENGTHS, gpu)


def _memory(**keys: Any) -> dict[str, Any]:
    return peak_memory(_run(**keys))


@pytest.mark.parametrize(
    ("keys", "sharing", "per_machine"),
    [
        ({}, 1, 1),
        ({"optim": "adamw_8bit"}, 1, 1),
        (SHARDED, 16, 8),
        (SHARDED | {"sharding": "hybrid"}, 8, 8),
        (SHARDED | {"sharding": "none"}, 1, 8),
    ],
    ids=["one process", "8 bits", "sharded", "hybrid", "whole in each"],
)
def test_a_gpu_is_spared_the_moments_that_its_machine_holds(
    keys: dict[str, Any], sharing: int, per_machine: int
) -> None:
    moments = 4 * MOMENTS[keys.get("optim", "adamw")] * qwen("7B").parameters / sharing / GIB
    offloaded, plain = _memory(**keys), _memory(**keys, offload="none")
    assert plain["peak_memory_gib"] - offloaded["peak_memory_gib"] == pytest.approx(moments)
    assert offloaded["host_memory_gib"] == pytest.approx(per_machine * moments)
    assert "host_memory_gib" not in plain


def test_moments_of_an_adapter_are_its_own() -> None:
    adapter = adapter_parameters(qwen("7B"), _config(use_peft=True))
    assert _memory(use_peft=True, **SHARDED)["host_memory_gib"] == pytest.approx(8 * 8 * adapter / GIB)


def test_a_step_that_needs_more_than_a_pass_counts_with_the_moments_of_the_largest_parameter() -> None:
    """With short completions, one per pass: the embedding of 7B and its moments are more than what a pass needs."""
    keys = {"per_device_train_batch_size": 1, "num_generations": 2, "max_completion_length": 1}
    shape = model_shape({**QWEN["7B"], "vocab_size": 1_000_000, "num_hidden_layers": 1})
    run = replace(_run(shape, **keys, use_peft=False), lengths=PromptLengths(1, 1, "given"))
    parts = peak_memory(run)["parts_gib"]
    assert parts["optimizer"] * GIB == 8 * 1_000_000 * 3584
    assert not {"activations", "logits"} & parts.keys()
    assert peak_memory(_run(shape, **keys, offload="none"))["parts_gib"]["optimizer"] > parts["optimizer"]


@pytest.mark.parametrize("vocabulary", [100, 10_000])
@pytest.mark.parametrize("experts", [False, True], ids=["plain", "experts"])
def test_the_largest_parameter_is_that_of_the_model(experts: bool, vocabulary: int) -> None:
    sizes = {"vocab_size": vocabulary, "hidden_size": 64, "intermediate_size": 200, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    config: Any = Qwen3MoeConfig(**sizes, **EXPERTS) if experts else Qwen2Config(**sizes)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    largest = max(parameter.numel() for parameter in model.parameters())
    assert model_shape(config.to_dict()).largest_parameter == largest


def test_moments_go_there_and_back_at_a_stated_pace() -> None:
    """Also with one process, which otherwise sends nothing."""
    for keys, processes in (({}, 1), (SHARDED, 16)):
        found, without = communication(_run(**keys), 1), communication(_run(**keys, offload="none"), 1)
        way = 2 * 8 * qwen("7B").parameters / processes
        assert found["parts_gib"]["offloaded"] * GIB == pytest.approx(way)
        assert found["seconds_per_update"] - without["seconds_per_update"] == pytest.approx(way / 25e9)
        assert "25 GB/s between a GPU and its host's memory" in found["how"]
        assert without["parts_gib"]["offloaded"] == 0
        assert "host" not in without["how"]


def _forecast(folder: Path, gpu: Gpu, size: str = "7B", **keys: Any) -> dict[str, dict[str, Any]]:
    (folder / "config.json").write_text(json.dumps(QWEN[size]))
    run = _run(name_or_path=str(folder), **keys)
    return forecast(run.config, run.plan, LENGTHS, "not measured", [], gpu)


def test_a_plan_shows_the_host_s_memory_and_the_way_there(tmp_path: Path) -> None:
    rows = {what.strip(): value for what, value, _ in forecast_rows(_forecast(tmp_path, named_gpu("H200")))}
    assert rows["host's memory"] == rows["offloaded"].replace("113.5", "56.7") == "56.7 GiB"
    assert rows["communication per update"] == "4.9 s"  # and 0.05 s to a server beside it
    alone = {"offload": "none", "engine": "transformers"}
    plain = {what.strip() for what, *_ in forecast_rows(_forecast(tmp_path, named_gpu("H200"), **alone))}
    assert not {"host's memory", "offloaded", "communication per update"} & plain


def test_moments_that_the_machine_certainly_cannot_hold_are_refused(tmp_path: Path) -> None:
    small = Gpu("GPU", 80.0, per_machine=8, host_gib=56.0)
    with pytest.raises(ConfigError) as refused:
        _forecast(tmp_path, small)
    first = str(refused.value).splitlines()[0]
    assert first.startswith(
        "train.offload = 'optimizer': AdamW's moments are 56.7 GiB per process, 56.7 GiB for the 1 of this machine, "
        "whose memory is 56.0 GiB; set it to 'none', or train.optim to 'adamw_8bit', or share"
    )
    check_host_memory(_run(gpu=small, optim="adamw_8bit"))
    check_host_memory(_run(gpu=small, offload="none"))
    check_host_memory(_run(gpu=small, **SHARDED))  # half of them is on this machine
    check_host_memory(_run(gpu=Gpu("GPU", 80.0)))  # elsewhere
    with pytest.raises(ConfigError, match="for the 8 of this machine"):
        check_host_memory(_run(gpu=small, **SHARDED | {"sharding": "hybrid"}))


def test_what_would_fit_by_offloading_is_offered_where_the_machine_can_hold_it(tmp_path: Path) -> None:
    def offered(host_gib: float) -> list[dict[str, Any]]:
        gpu = Gpu("GPU", 80.0, per_machine=8, host_gib=host_gib)
        keys = {"per_device_train_batch_size": 4, "num_generations": 4, "gradient_checkpointing": True}
        keys |= {"engine": "vllm", "vllm_tensor_parallel_size": 8}
        found = _forecast(tmp_path, gpu, "32B", **(SHARDED | keys | {"num_processes": 8}), offload="none")
        return [remedy["changes"] for remedy in found["memory"]["remedies"]]

    assert {"train.offload": "optimizer"} in offered(256.0)
    assert all("train.offload" not in changes or len(changes) > 1 for changes in offered(240.0))
