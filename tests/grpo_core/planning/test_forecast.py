"""Forecasts: parameters and memory against torch's own counts, time and signal against direct calculation."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed._tools.mem_tracker import MemTracker
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from grpo_core.config.files import parse_config
from grpo_core.config.run import RunConfig
from grpo_core.model.loading import with_adapter
from grpo_core.model.policy import Policy
from grpo_core.model.sequences import Sequences
from grpo_core.planning.forecast import (
    GIB,
    ForecastError,
    PromptLengths,
    Throughput,
    adapter_parameters,
    find_gpu,
    forecast,
    forecast_rows,
    load_shape,
    model_shape,
    name_hardware,
    peak_memory,
    useful_groups,
    wall_time,
)
from grpo_core.planning.plan import Plan, make_plan, plan_inputs
from tests.conftest import config_values

SIZES = {
    "vocab_size": 2000,
    "hidden_size": 256,
    "intermediate_size": 700,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def _config(**keys: Any) -> RunConfig:
    return parse_config(config_values(Path("model"), Path("data"), **keys))


def _plan(config: RunConfig, num_prompts: int = 1000) -> Plan:
    return make_plan(plan_inputs(config, num_prompts))


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        (Qwen2Config, {}),
        (Qwen2Config, {"tie_word_embeddings": True}),
        (LlamaConfig, {}),
        (LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
        (MistralConfig, {"head_dim": 32}),
        (Qwen3Config, {"head_dim": 128}),
        (Qwen3Config, {"attention_bias": True, "tie_word_embeddings": True}),
    ],
)
def test_parameters_are_those_of_the_model(family: Any, changes: dict[str, Any]) -> None:
    config = family(**SIZES, **changes)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert model_shape(config.to_dict()).parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("targets", [None, ["q_proj", "down_proj"]])
def test_adapter_parameters_are_those_of_the_adapter(targets: list[str] | None) -> None:
    config = _config(use_peft=True, lora_r=4, **({"lora_target_modules": targets} if targets else {}))
    model = with_adapter(AutoModelForCausalLM.from_config(Qwen2Config(**SIZES)), config.model)
    adapter = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert adapter_parameters(model_shape(Qwen2Config(**SIZES).to_dict()), config) == adapter


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prompt", "completion", "sizes", "keys"),
    [
        (50, 100, {}, {}),
        (100, 8, {"num_hidden_layers": 12}, {}),
        (10, 100, {"vocab_size": 20_000}, {}),
        (50, 100, {}, {"mixed_precision": "bf16"}),
        (100, 8, {"num_hidden_layers": 12}, {"gradient_checkpointing": True}),
    ],
    ids=["ordinary", "long prompts", "large vocabulary", "bf16", "recomputing"],
)
def test_forecast_memory_is_what_torch_counts_at_the_peak(
    prompt: int, completion: int, sizes: dict[str, int], keys: dict[str, Any]
) -> None:
    """Never less than the peak of the second micro-step, where the gradients of the first are held, nor much more."""
    config = _config(per_device_train_batch_size=8, max_completion_length=completion, **keys)
    shape = Qwen2Config(**{**SIZES, **sizes})
    parts = peak_memory(
        config, _plan(config), model_shape(shape.to_dict()), PromptLengths(prompt, prompt, "given"), "H200"
    )
    measured = _measured_peak(shape, prompt, completion, config)
    expected = (sum(parts["parts_gib"].values()) - parts["parts_gib"]["kv_cache"]) * GIB
    assert measured <= expected <= 1.3 * measured


def _measured_peak(shape: Any, prompt: int, completion: int, config: RunConfig) -> int:
    model = AutoModelForCausalLM.from_config(shape).eval()
    keys = config.train
    bf16 = keys.mixed_precision == "bf16"
    policy = Policy(model, 1.0, bf16=bf16, gradient_checkpointing=keys.gradient_checkpointing)
    policy.packs = False  # what is forecast is a GPU's, whose attention keeps no scores
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():  # so that the optimizer has its state
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    ids = torch.randint(0, shape.vocab_size, (config.train.per_device_train_batch_size, prompt + completion))
    tracker = MemTracker()
    tracker.track_external(model, policy, optimizer)
    with tracker:
        for again in (False, True):
            if again:
                tracker.reset_mod_stats()
            lengths = (torch.full((len(ids),), n) for n in (prompt, completion))
            logprobs, _ = policy(policy.prepare(Sequences(ids, *lengths, torch.arange(len(ids)))))
            logprobs.mean().backward()
    return tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]


def test_what_is_held_follows_from_the_configuration() -> None:
    shape, lengths = model_shape(Qwen2Config(**SIZES).to_dict()), PromptLengths(10, 10, "given")

    def parts(**keys: Any) -> dict[str, float]:
        config = _config(**keys)
        found = peak_memory(config, _plan(config), shape, lengths, "H200")["parts_gib"]
        return {name: size * GIB / shape.parameters for name, size in found.items()}

    assert [parts()[name] for name in ("weights", "gradients", "optimizer", "reference")] == [4, 4, 8, 0]
    assert parts(beta=0.1)["reference"] == 4
    half = parts(beta=0.1, mixed_precision="bf16")
    assert [half[name] for name in ("weights", "bf16_copy", "gradients", "optimizer", "reference")] == [4, 2, 4, 8, 2]
    assert parts(use_peft=True, mixed_precision="bf16")["weights"] < 1
    lora = parts(beta=0.1, use_peft=True)
    assert lora["reference"] == 0
    assert lora["optimizer"] < 1
    cache = 16 * (10 + 6) * 2 * 6 * 128 * 4  # completions · tokens · (keys, values) · layers · size · float32
    assert parts()["kv_cache"] * shape.parameters == pytest.approx(cache)
    assert parts(engine="vllm")["engine_weights"] == 2


@pytest.mark.parametrize("gpu", ["", "NVIDIA H200"])
def test_time_at_the_pace_of_earlier_runs_and_gpu_hours_only_with_a_gpu(gpu: str) -> None:
    config = _config(max_steps=10, num_processes=2, max_completion_length=100)
    known = Throughput(1000.0, 4.0, "measured")
    found = wall_time(config, _plan(config), PromptLengths(6.0, 9, "given"), known, None, gpu)
    assert found["wall_time_hours"] == pytest.approx(10 * 32 * (6 + 4) / 2000 / 3600)
    assert found.get("gpu_hours") == (pytest.approx(2 * found["wall_time_hours"]) if gpu else None)
    assert "measured" in found["how"]


@pytest.mark.parametrize(("recomputed", "operations"), [(False, 8), (True, 10)])
def test_time_without_earlier_runs_names_the_gpu_it_assumes(recomputed: bool, operations: int) -> None:
    config = _config(max_steps=10, max_completion_length=100, gradient_checkpointing=recomputed)
    found = wall_time(config, _plan(config), PromptLengths(6.0, 9, "given"), None, 10**9, "NVIDIA H200 NVL")
    assert "assumed: 11% of the 790 TFLOP/s of one NVIDIA H200 NVL" in found["how"]
    # 16 completions of 106 tokens an update, so many floating-point operations a parameter and token.
    assert found["gpu_hours"] == pytest.approx(10 * 16 * 106 * operations * 1e9 / (0.11 * 790e12) / 3600)


@pytest.mark.parametrize("gpu", ["", "NVIDIA L4"])
def test_hardware_of_unknown_pace_has_no_time_and_a_cpu_no_memory_forecast(gpu: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(Qwen2Config(**SIZES).to_dict()))
    config = parse_config(config_values(tmp_path, Path("data"), engine="auto"))
    found = forecast(config, _plan(config), PromptLengths(6, 6, "given"), None, [], gpu)
    rows = {what: (value, how) for what, value, how in forecast_rows(found)}
    value, how = rows.pop("wall time")
    assert (value, name_hardware(gpu) in how) == ("unknown until a first run", True)
    assert bool(rows) == bool(gpu)
    assert not gpu or "estimate for one NVIDIA L4" in rows["peak memory per GPU"][1]
    assert not gpu or "by vllm" in rows["peak memory per GPU"][1]


def test_the_gpu_is_the_first_that_nvidia_smi_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_gpu() == ""
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 'NVIDIA H200'\necho 'NVIDIA L4'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    assert find_gpu() == "NVIDIA H200"
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed'\nexit 9\n")
    assert find_gpu() == ""


@pytest.mark.parametrize("g", [2, 3, 5])
def test_useful_groups_are_those_with_both_outcomes(g: int) -> None:
    rates = [0.0, 0.3, 0.9, 1.0]
    share = 0.0
    for p, outcome in itertools.product(rates, itertools.product([0, 1], repeat=g)):
        if len(set(outcome)) == 2:
            share += p ** sum(outcome) * (1 - p) ** (g - sum(outcome)) / len(rates)
    assert useful_groups(rates, g)["share"] == pytest.approx(share)


def test_what_cannot_be_forecast_says_why(tmp_path: Path) -> None:
    with pytest.raises(ForecastError, match=r"no such folder with a config\.json"):
        load_shape(str(tmp_path))
    with pytest.raises(ForecastError, match="model_type 'mamba'"):
        model_shape({"model_type": "mamba"})
    assert "between 0 and 1" in useful_groups([0.5, 1.5], 4)["error"]
    config = _config()
    found = forecast(config, _plan(config), PromptLengths(6, 6, "given"), None, [], "H200")
    assert set(found) == {"memory", "time"}
    assert all("error" in part for part in found.values())
