"""Forecasts: parameters and memory against torch's own counts, time and signal against direct calculation."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen2Config

from grpo_core.config.files import parse_config
from grpo_core.config.run import RunConfig
from grpo_core.planning.forecast import forecast, forecast_rows, useful_groups
from grpo_core.planning.hardware import Gpu, named_gpu
from grpo_core.planning.pace import EnvironmentPace, Pace, Throughput, ValidatedCosts
from grpo_core.planning.plan import Plan, make_plan, plan_inputs
from grpo_core.planning.shapes import (
    ForecastError,
    PromptLengths,
    load_shape,
    model_shape,
)
from grpo_core.planning.wall_time import wall_time
from tests.conftest import config_values
from tests.qwen import SIZES, qwen


def config_with(**keys: Any) -> RunConfig:
    return parse_config(config_values(Path("model"), Path("data"), **keys))


def plan_of(config: RunConfig, num_prompts: int = 1000) -> Plan:
    return make_plan(plan_inputs(config, num_prompts))


@pytest.mark.parametrize("gpu", [None, Gpu("NVIDIA H200")])
def test_time_at_the_pace_of_earlier_runs_and_gpu_hours_only_with_a_gpu(gpu: Gpu | None) -> None:
    config = config_with(max_steps=10, num_processes=2, max_completion_length=100)
    known = Throughput(1000.0, 4.0, "measured", 90.0)
    found = wall_time(config, plan_of(config), PromptLengths(6.0, 9, "given"), known, None, gpu)
    assert found["parts_hours"]["updates"] == pytest.approx(10 * 32 * (6 + 4) / 2000 / 3600)
    assert found["wall_time_hours"] == pytest.approx(found["parts_hours"]["updates"] + 90 / 3600)
    assert found.get("gpu_hours") == (pytest.approx(2 * found["wall_time_hours"]) if gpu else None)
    assert "measured" in found["how"]


RECORDED = {"engine": "recorded", "recording": "storage/runs/a"}
PACE = Pace(
    sample_seconds=8.0,
    train_seconds=3.0,
    step_seconds=0.5,
    start_seconds=20.0,
    byte_seconds=1e-9,
    completion_tokens=5.0,
    completions=16,
    how="measured",
)


@pytest.mark.parametrize(
    ("keys", "given", "updates"),
    [
        # 10 updates: each samples 16 completions, makes one forward and backward pass over them, and a step.
        ({}, {}, 10 * (8 + 3 + 0.5)),
        ({"num_processes": 2}, {}, 10 * (8 + 3 + 0.5)),  # each process samples and trains on 16
        ({"gradient_accumulation_steps": 3}, {}, 10 * (3 * 8 + 3 * 3 + 0.5)),
        # Two updates per rollout, and 1/3 of a pass per micro-step for the old log-probabilities.
        ({"num_iterations": 2}, {}, 5 * 8 + 10 * 3 + 5 * 1 + 10 * 0.5),
        ({"beta": 0.1}, {}, 10 * (8 + 3 + 1 + 0.5)),  # the reference's log-probabilities
        ({}, {"costs": ValidatedCosts(reward_seconds=0.25)}, 10 * (8 + 16 * 0.25 + 3 + 0.5)),
        # 1 + s + s² + s³ rounds, with s = 1/2 of the groups silent.
        ({"dynamic_sample": True}, {"silent_share": 0.5}, 10 * (1.875 * 8 + 3 + 0.5)),
        (
            RECORDED,
            {"costs": ValidatedCosts(reward_seconds=0.25)},
            10 * (3 + 0.5),
        ),  # what was sampled and scored before
    ],
)
def test_a_measured_pace_times_the_work_of_the_plan_is_the_time(
    keys: dict[str, Any], given: dict[str, Any], updates: float
) -> None:
    sizes = {"max_steps": 10, "max_completion_length": 100, "per_device_train_batch_size": 16}
    config = config_with(**{**sizes, "gradient_accumulation_steps": 1, **keys})
    found = wall_time(config, plan_of(config), PromptLengths(6.0, 9, "given"), PACE, None, None, **given)
    assert found["parts_hours"]["updates"] * 3600 == pytest.approx(updates)


def test_start_evaluations_and_checkpoints_are_part_of_a_measured_time() -> None:
    shape, lengths = model_shape(Qwen2Config(**SIZES).to_dict()), PromptLengths(6.0, 9, "given")
    config = config_with(max_steps=10, eval_steps=4, save_steps=3, max_completion_length=100)
    costs = ValidatedCosts(held_out_prompts=64, reward_seconds=0.25)
    found = wall_time(config, plan_of(config), lengths, PACE, shape, None, costs=costs)
    parts = {name: hours * 3600 for name, hours in found["parts_hours"].items()}
    assert parts["start"] == 20
    assert parts["evaluations"] == pytest.approx(3 * 64 * (8 / 16 + 0.25))  # after updates 4, 8 and 10
    assert parts["checkpoints"] == pytest.approx((3 * 12 + 4) * shape.parameters * 1e-9)  # 3, 6 and 9, and the model
    assert found["wall_time_hours"] * 3600 == pytest.approx(sum(parts.values()))
    assert "without" not in found["how"]
    left_out = wall_time(config, plan_of(config), lengths, PACE, shape, None)
    assert "without scoring and evaluations, known once the data are validated" in left_out["how"]
    on_gpu = wall_time(config, plan_of(config), lengths, PACE, shape, Gpu("GPU"))
    assert on_gpu["parts_hours"]["start"] * 3600 == 20
    config = config_with(engine="auto")
    on_gpu = wall_time(config, plan_of(config), lengths, PACE, shape, Gpu("GPU"))
    assert on_gpu["parts_hours"]["start"] * 3600 == 80  # vLLM starts too
    config = config_with(**RECORDED)
    on_gpu = wall_time(config, plan_of(config), lengths, PACE, shape, Gpu("GPU"))
    assert on_gpu["parts_hours"]["start"] * 3600 == 20
    assert "without sampling and scoring, which a recording has done" in on_gpu["how"]


@pytest.mark.parametrize(
    ("keys", "sampled", "trained", "waits"),
    [
        # Two turns of 5 tokens beside the one measured, 4 + 3 tokens of the environment; the prompt has 6.
        ({}, 2, (6 + 10 + 7) / (6 + 5), 0.5 + 2.0),
        ({"max_completion_length": 12}, 1, (6 + 12) / (6 + 5), 0.5 + 2.0),  # which bounds all of it
        ({"max_turns": 1}, 1, (6 + 5 + 4) / (6 + 5), 0.5),
    ],
)
def test_conversations_are_taken_to_have_two_turns_at_a_measured_pace(
    keys: dict[str, Any], sampled: float, trained: float, waits: float
) -> None:
    turns = keys.pop("max_turns", 2)
    sizes = {"max_steps": 10, "max_completion_length": 100, "per_device_train_batch_size": 16}
    values = config_values(Path("model"), Path("data"), **{**sizes, "gradient_accumulation_steps": 1, **keys})
    config = parse_config({**values, "environment": {"tools": ["calculator"], "max_turns": turns}})
    environment = EnvironmentPace(frame_seconds=0.5, frame_tokens=4, call_seconds=2.0, call_tokens=3)
    given = (config, plan_of(config), PromptLengths(6.0, 9, "given"), PACE, None, None)
    found = wall_time(*given, costs=ValidatedCosts(reward_seconds=0.0, environment=environment))
    parts = {name: 3600 * hours for name, hours in found["parts_hours"].items()}
    assert parts["updates"] == pytest.approx(10 * (sampled * 8 + trained * 3 + 0.5))
    assert parts["waiting for environments"] == pytest.approx(10 * waits)
    assert f"{turns} turns are assumed" in found["how"] and "without" not in found["how"]
    unknown = wall_time(*given, costs=ValidatedCosts(reward_seconds=0.0))
    assert "waiting for environments" not in unknown["parts_hours"]
    assert "without the environment, known once the data are validated" in unknown["how"]


# Qwen2.5-32B by its config.json: 64 layers, 40 heads of 128 and 8 of keys and values; the head has 152,064 · 5,120.
LAYERS_32B = 64 * (5120 * (5120 + 2 * 1024) + 5120**2 + 3 * 5120 * 27648 + 7168 + 2 * 5120)
HEAD_32B = 152_064 * 5120
# 10 updates of 16 completions of 100 tokens, in 4 groups after prompts of 6 tokens; FLOPs of one forward pass.
LAYERS = 10 * 2 * LAYERS_32B * (4 * 6 + 16 * 100)
HEAD = 10 * 2 * HEAD_32B * 16 * 100
ATTENTION = 10 * 64 * 2 * 2 * 5120 * (4 * 6**2 / 2 + 16 * (106**2 - 6**2) / 2)  # by queries, then by weights
PREFILL = 10 * 4 * (2 * LAYERS_32B * 6 + 64 * 2 * 2 * 5120 * 6**2 / 2)


@pytest.mark.parametrize(
    ("keys", "layers", "head", "attention"),
    [
        ({}, 3, 3, 3.5),
        ({"gradient_checkpointing": True}, 4, 3, 4.5),
        ({"use_peft": True, "lora_dropout": 0.0}, 2, 2, 3.5),  # frozen weights have no gradient
        ({"beta": 0.1}, 4, 4, 4.5),  # the reference's log-probabilities
        (RECORDED, 3, 3, 3.5),
    ],
    ids=str,
)
def test_a_time_without_earlier_runs_is_an_interval_by_flops_and_bytes(
    keys: dict[str, Any], layers: float, head: float, attention: float
) -> None:
    config = config_with(max_steps=10, max_completion_length=100, mixed_precision="bf16", **keys)
    lengths, gpu = PromptLengths(6.0, 9, "given"), Gpu("NVIDIA H200 NVL")  # 835 TFLOP/s, 4.8 TB/s
    found = wall_time(config, plan_of(config), lengths, None, qwen("32B"), gpu, communication=2.0)
    samples, flops = keys != RECORDED, layers * LAYERS + head * HEAD + attention * ATTENTION
    # A token step reads all weights except the embedding's, and 16 caches of 56 tokens in the mean, in bf16.
    read = 100 * 2 * (LAYERS_32B + HEAD_32B + 5120 + 16 * 56 * 64 * 2 * 1024) / 4.8e12
    for hours, utilisation, bandwidth, beside in zip(
        found["interval_hours"], (0.535, 0.215), (0.85, 0.35), (0.06, 0.15), strict=True
    ):
        seconds = (flops + samples * PREFILL) / (utilisation * 835e12) + 10 * (samples * read / bandwidth + beside + 2)
        assert hours * 3600 == pytest.approx(seconds)
    low, high = found["interval_hours"]
    assert found["wall_time_hours"] == found["gpu_hours"] == pytest.approx((low * high) ** 0.5)
    assert "assumed, not measured: passes at 21.5% to 53.5% of the 835 TFLOP/s of one NVIDIA H200 NVL" in found["how"]
    assert ("sampling at 35% to 85% of its 4.8 TB/s" in found["how"]) == samples
    rows = {what: value for what, value, _ in forecast_rows({"time": found})}
    assert rows["GPU hours"] == f"{low:.2f} to {high:.2f}"


def test_no_time_is_assumed_where_nothing_supports_one() -> None:
    config, half = config_with(), config_with(mixed_precision="bf16")
    for keys, gpu, said in (
        (config, "NVIDIA H200", r"a pace is assumed only with train\.mixed_precision = 'bf16'"),
        (half, "NVIDIA L4", "a pace is assumed only for B200, H200 NVL"),
    ):
        with pytest.raises(ForecastError, match=said):
            wall_time(keys, plan_of(keys), PromptLengths(6.0, 9, "given"), None, qwen("32B"), Gpu(gpu))


@pytest.mark.parametrize("gpu", [None, Gpu("NVIDIA L4", 22.5)])
def test_hardware_of_unknown_pace_has_no_time_and_a_cpu_no_memory_forecast(gpu: Gpu | None, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(Qwen2Config(**SIZES).to_dict()))
    config = parse_config(config_values(tmp_path, Path("data"), engine="auto"))
    found = forecast(config, plan_of(config), PromptLengths(6, 6, "given"), "not measured", [], gpu)
    rows = {what: (value, how) for what, value, how in forecast_rows(found)}
    assert rows.pop("wall time") == ("unknown until a first run", "not measured")
    assert bool(rows) == bool(gpu)
    assert not gpu or "estimate for one NVIDIA L4" in rows["peak memory per GPU"][1]
    assert not gpu or "vLLM takes rollout.gpu_memory_utilization = 0.3 of 22.5 GiB" in rows["peak memory per GPU"][1]


@pytest.mark.parametrize(
    ("name", "gb"),
    [
        ("h200", 141), ("NVIDIA H100 80GB HBM3", 80), ("A100", 80), ("NVIDIA A100-PCIE-40GB", 40), ("L40S", 48),
        ("NVIDIA L4", 24), ("NVIDIA A10G", 24), ("RTX A6000", 48), ("NVIDIA GeForce RTX 4090", 24), ("Tesla T4", 16),
        ("NVIDIA L400", None), ("MI300X", None),
    ],
)  # fmt: skip
def test_a_named_gpu_has_the_memory_that_its_maker_names(name: str, gb: int | None) -> None:
    """Data sheets say powers of ten or of two, and part of it is kept for error correction."""
    found = named_gpu(name).memory_gib
    assert found == gb if gb is None else 0.92 * gb < found < 1.01 * gb


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
    config = config_with()
    found = forecast(config, plan_of(config), PromptLengths(6, 6, "given"), None, [], Gpu("H200"))
    assert set(found) == {"memory", "time"}
    assert all("error" in part for part in found.values())
