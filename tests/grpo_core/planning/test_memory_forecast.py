"""Forecasts of memory, against direct calculation."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import Qwen2Config

from grpo_core.errors import ConfigError
from grpo_core.planning.hardware import Gpu, named_gpu
from grpo_core.planning.memory import GIB, check_engine_memory, peak_memory
from grpo_core.planning.shapes import (
    PromptLengths,
    model_shape,
)
from tests.grpo_core.planning.test_forecast import RECORDED, config_with
from tests.qwen import SIZES, planned


def test_what_is_held_follows_from_the_configuration() -> None:
    shape, lengths = model_shape(Qwen2Config(**SIZES).to_dict()), PromptLengths(10, 10, "given")

    def parts(**keys: Any) -> dict[str, float]:
        found = peak_memory(planned(config_with(**keys), shape, lengths, Gpu("GPU", 10.0)))["parts_gib"]
        return {name: size * GIB / shape.parameters for name, size in found.items()}

    assert [parts()[name] for name in ("weights", "gradients", "optimizer", "reference")] == [4, 4, 8, 0]
    assert parts(beta=0.1)["reference"] == 4
    half = parts(beta=0.1, mixed_precision="bf16")
    assert [half[name] for name in ("weights", "bf16_copy", "gradients", "optimizer", "reference")] == [4, 2, 4, 8, 2]
    # A reference that moves has float32 masters, and a bf16 copy to compute with.
    assert parts(beta=0.1, sync_ref_model=True)["reference"] == 4
    assert parts(beta=0.1, sync_ref_model=True, mixed_precision="bf16")["reference"] == 6
    assert parts(use_peft=True, mixed_precision="bf16")["weights"] < 1
    sent = [parts(engine="vllm-server", **keys)["engine_weights"] for keys in ({}, {"use_peft": True})]
    assert sent == [4, 0]  # an adapter's copy is in the host's memory
    assert parts(engine="vllm-server", use_peft=True, lora_modules_to_save=["lm_head"])["engine_weights"] == 4
    lora = parts(beta=0.1, use_peft=True)
    assert lora["reference"] == 0
    assert lora["optimizer"] < 1
    cache = 16 * (10 + 6) * 2 * 6 * 128 * 4  # completions · tokens · (keys, values) · layers · size · float32
    assert parts()["kv_cache"] * shape.parameters == pytest.approx(cache)
    recorded = parts(**RECORDED)
    assert (recorded["kv_cache"], recorded["engine_weights"], recorded["weights"]) == (0, 0, 4)


def test_vllm_takes_its_share_of_the_gpu_and_lends_all_but_its_weights_to_the_training() -> None:
    shape, lengths = model_shape(Qwen2Config(**SIZES).to_dict()), PromptLengths(10, 10, "given")

    def found(gpu: Gpu, **keys: Any) -> dict[str, Any]:
        config = config_with(**{"engine": "vllm", "gpu_memory_utilization": 0.25, **keys})
        return peak_memory(planned(config, shape, lengths, gpu))

    ten, weight = Gpu("GPU", 10.0), shape.parameters / GIB
    for keys, own in (
        ({"mixed_precision": "no"}, 8),  # AdamW's state; vLLM's float32 weights are the ones that are trained
        ({"mixed_precision": "bf16"}, 4 + 8),  # float32 masters too; the bf16 weights are vLLM's
        ({"mixed_precision": "bf16", "beta": 0.1}, 4 + 8 + 2),
    ):
        sampling = found(ten, **keys)  # a quarter of 10 GiB is more than this model's training takes
        assert sampling["peak_memory_gib"] == pytest.approx(2.5 + own * weight)
        training = found(ten, **keys, gpu_memory_utilization=3 * weight / 10)
        working = sum(training["parts_gib"][name] for name in ("gradients", "activations", "logits"))
        width = 4 if keys["mixed_precision"] == "no" else 2
        assert training["parts_gib"]["gradients"] == pytest.approx(4 * weight)
        assert training["peak_memory_gib"] == pytest.approx((own + width) * weight + working)
    lora = found(ten, mixed_precision="bf16", use_peft=True)
    assert lora["parts_gib"]["bf16_copy"] < 0.2 * weight  # of the adapter alone: the base is vLLM's own
    for keys in ({"load_in_4bit": True}, {"lora_modules_to_save": ["lm_head"]}):
        apart = found(ten, mixed_precision="bf16", use_peft=True, **keys)["parts_gib"]
        assert apart["bf16_copy"] > (0.5 if "load_in_4bit" in keys else 2) * weight
    assert lora["parts_gib"]["engine_weights"] == pytest.approx(2 * weight)
    two = found(ten, mixed_precision="bf16", num_processes=2, vllm_tensor_parallel_size=2)["parts_gib"]
    assert two["engine_weights"] == pytest.approx(weight)  # half of them, which the trainer cannot compute with
    assert two["bf16_copy"] == pytest.approx(2 * weight)
    unknown = found(Gpu("GPU of a pool"), mixed_precision="no")
    assert unknown["parts_gib"]["kv_cache"] == pytest.approx(16 * 16 * 2 * 6 * 128 * 4 / GIB)
    assert "a memory that is not known" in unknown["how"]
    assert "warning" not in unknown
    assert found(Gpu("GPU", 0.05))["warning"] == "more than the 51.2 MiB of one GPU"


# Qwen2.5-7B by its model card: 7.61B parameters, 28 layers, 4 key-value heads of 128. In bf16 15.2e9 bytes of weights
# are 14.19 GiB, and a token's keys and values 2 · 28 · 512 · 2 = 57,344 bytes.
@pytest.mark.parametrize(
    ("gpu", "share", "keys", "refused"),
    [
        ("L40S", 0.3, {"use_peft": True}, "share of one L40S is 13.5 of 45.0 GiB"),  # 48 GB: 0.3 · 44.99 = 13.50
        ("L40S", 0.32, {"use_peft": True}, ""),  # 14.40
        ("L40S", 0.317, {"use_peft": True, "max_completion_length": 3000}, "at least 0.32"),  # 14.26 < 14.19 + 0.16
        ("NVIDIA H100 80GB HBM3", 0.3, {}, ""),  # 23.9
        ("NVIDIA A100-SXM4-40GB", 0.35, {}, "at least 0.36"),  # 14.0 of 40: 14.19 / 40 = 0.355
        ("NVIDIA A10G", 0.3, {}, "at least 0.64"),  # 22.48: 14.19 / 22.48 = 0.631
        ("T4", 0.9, {}, "at least 0.95"),  # 15.0: 14.19 / 15 = 0.946
        ("L4", 0.9, {"mixed_precision": "no"}, "mixed_precision = 'bf16'"),  # 28.4 of 22.5
        ("a GPU of unknown memory", 0.01, {}, ""),
        ("NVIDIA A10G", 0.35, {"num_processes": 2, "vllm_tensor_parallel_size": 2}, ""),  # 7.87: half is 7.09
        ("NVIDIA A10G", 0.3, {"num_processes": 2, "vllm_tensor_parallel_size": 2}, "at least 0.32"),  # 6.75
        ("NVIDIA A10G", 0.3, {"engine": "vllm-server"}, "at least 0.64"),  # of a GPU of the server's own
        ("NVIDIA A10G", None, {"engine": "vllm-server"}, ""),  # 0.9 of it
        ("NVIDIA A10G", None, {"engine": "vllm-server", "vllm_weight_transfer": "ipc"}, "at least 0.64"),  # shared
        ("T4", 0.9, {"engine": "vllm-server", "vllm_tensor_parallel_size": 2}, ""),  # 13.5: half is 7.09
        ("T4", 0.9, {"engine": "vllm-server", "mixed_precision": "no"}, "GPUs that share a server's weights"),
        ("L40S", 0.01, {"engine": "vllm-server", "vllm_server_base_urls": ["http://a:1"]}, ""),  # elsewhere
    ],
)
def test_a_share_that_cannot_hold_vllms_weights_and_one_sequence_is_refused(
    gpu: str, share: float | None, keys: dict[str, Any], refused: str
) -> None:
    values = {"engine": "vllm", "mixed_precision": "bf16"} | keys
    values |= {} if share is None else {"gpu_memory_utilization": share}
    try:
        check_engine_memory(planned(config_with(**values), "7B", PromptLengths(100, 100, "given"), named_gpu(gpu)))
    except ConfigError as error:
        assert refused and refused in str(error)
        assert f"rollout.gpu_memory_utilization = {share or 0.3:g}" in str(error)
    else:
        assert not refused
