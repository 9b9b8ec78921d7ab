"""The times of a probe and of a warm start in the forecast, against direct calculation."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from grpo_core.config.files import parse_config
from grpo_core.planning.forecast import forecast_rows
from grpo_core.planning.hardware import Gpu
from grpo_core.planning.pace import Pace, Throughput, ValidatedCosts
from grpo_core.planning.plan import make_plan, plan_inputs
from grpo_core.planning.shapes import PromptLengths
from grpo_core.planning.wall_time import wall_time
from grpo_core.planning.warm_start import Sizes, describe_warm_start
from tests.conftest import config_values
from tests.grpo_core.planning.test_forecast import PACE
from tests.qwen import qwen

EARLIER = Throughput(1000.0, 4.0, "measured", 90.0, sample_seconds=0.2)
OWN = 26 * 3  # completions that each of 2 processes samples of 51 prompts


@pytest.mark.parametrize(
    ("source", "keys", "seconds", "words"),
    [
        # Half a second to sample a completion, a quarter to score it; the probe loads a model too.
        (PACE, {}, 20 + OWN * (0.5 + 0.25), "measured"),
        (PACE, {"engine": "auto"}, 20 + 60 + OWN * (0.5 + 0.25), "measured"),  # and starts vLLM
        (EARLIER, {}, OWN * 0.2, "the probe without its start"),
        (EARLIER, {"max_completion_length": 2}, OWN * 0.1, "the probe without its start"),  # of 4 tokens before
        # 6 tokens of the prompt and 4 of the completion, at the pace of sampling and training.
        (dataclasses.replace(EARLIER, sample_seconds=None), {}, OWN * (6 + 4) / 1000, "the probe at most, as if it"),
        # All sampled together, in 100 token steps of 4 to 10 ms: the geometric middle.
        (None, {}, 100 * (0.004 * 0.01) ** 0.5, "assumed"),
    ],
)
def test_the_probe_s_time_is_that_of_sampling_each_prompt_and_is_in_the_total(
    source: Throughput | Pace | None, keys: dict[str, Any], seconds: float, words: str
) -> None:
    sizes = {"max_completion_length": 100, "num_processes": 2, "max_steps": 10, "mixed_precision": "bf16"}
    values = config_values(Path("model"), Path("data"), **{**sizes, **keys})
    billion = dataclasses.replace(qwen("7B"), kinds=(), outside=10**9)

    def found(probe: int) -> dict[str, Any]:
        config = parse_config({**values, "data": {**values["data"], "curriculum": {"probe": probe}}})
        plan, lengths = make_plan(plan_inputs(config, 51)), PromptLengths(6.0, 9, "given")
        return wall_time(
            config, plan, lengths, source, billion, Gpu("NVIDIA H200"), costs=ValidatedCosts(reward_seconds=0.25)
        )

    without, asked = found(0), found(3)
    assert asked["parts_hours"].pop("probe") * 3600 == pytest.approx(seconds)
    assert asked["parts_hours"] == without["parts_hours"]
    assert (asked["wall_time_hours"] - without["wall_time_hours"]) * 3600 == pytest.approx(seconds)
    assert (asked["gpu_hours"] - without["gpu_hours"]) * 3600 == pytest.approx(2 * seconds)
    assert words in asked["how"] and "the probe" not in without["how"]
    assert "  probe" in [quantity for quantity, *_ in forecast_rows({"time": found(3000)})]


FLOPS = 640 * 30 * 6 * 152_064 * 3_584
ASSUMED = math.sqrt((FLOPS / (0.535 * 989e12) + 20 * 0.06) * (FLOPS / (0.215 * 989e12) + 20 * 0.15))


# Two processes, 2 epochs of 640 demonstrations of 30 tokens in the mean, of which the longest completion alone has 90:
# 20 updates of 64, each in 4 micro-steps of 8 per process.
@pytest.mark.parametrize(
    ("source", "keys", "seconds", "words"),
    [
        # 3 seconds for 8 rows of 6 + 5 tokens. It starts, saves 4 bytes per parameter with AdamW's 8 after updates 8
        # and 16, and the model.
        (PACE, {}, 20 + 20 * (4 * 3 * 30 / 11 + 0.5) + (2 * 12 + 4), "measured"),
        (PACE, {"engine": "vllm-server"}, 20 + 20 * (4 * 3 * 30 / 11 + 0.5) + (2 * 12 + 4), "measured"),
        (PACE, {"num_iterations": 2, "beta": 0.1}, 20 + 20 * (4 * 3 * 30 / 11 + 0.5) + (2 * 12 + 4), "measured"),
        # Of the 10 milliseconds of 6 + 4 tokens, 2 are for sampling.
        (dataclasses.replace(EARLIER, sample_seconds=0.002), {}, 640 * 30 * 0.0008, "the warm start without its start"),
        (dataclasses.replace(EARLIER, sample_seconds=None), {}, 640 * 30 / 1000, "the warm start at most, as if it"),
        (EARLIER, {}, 640 * 30 / 1000, "the warm start at most, as if it"),  # sampled at its end for longer than that
        # Products with the output layer alone, whose weights each token passes once and its gradient twice, at 21.5 to
        # 53.5 % of 989 TFLOP/s, and 0.06 to 0.15 s per update.
        (None, {"beta": 0.1}, ASSUMED, "assumed"),
        (None, {"gradient_checkpointing": True}, ASSUMED, "assumed"),
    ],
)
def test_the_warm_start_s_time_is_that_of_the_training_s_passes_over_its_tokens_and_is_in_the_total(
    source: Throughput | Pace | None, keys: dict[str, Any], seconds: float, words: str
) -> None:
    sizes = {"max_completion_length": 100, "num_processes": 2, "max_steps": 10, "mixed_precision": "bf16"}
    sizes |= {"per_device_train_batch_size": 8, "save_steps": 8}
    values = config_values(Path("model"), Path("data"), **{**sizes, **keys})
    warm = {"demonstrations": "shown.jsonl", "batch_size": 64, "num_train_epochs": 2.0}
    billion, gpu = dataclasses.replace(qwen("7B"), kinds=(), outside=10**9), Gpu("NVIDIA H200")

    def found(warm_start: dict[str, Any], shown: Sizes | None) -> dict[str, Any]:
        config = parse_config({**values, "warm_start": warm_start})
        plan, lengths = make_plan(plan_inputs(config, 51)), PromptLengths(6.0, 9, "given")
        work = describe_warm_start(config, 640, shown, gpu)[1] if shown else None
        return wall_time(config, plan, lengths, source, billion, gpu, warm=work)

    without, unknown, asked = found({}, None), found(warm, None), found(warm, Sizes(640, 100, 90, 30.0))
    assert asked["parts_hours"].pop("warm-start") * 3600 == pytest.approx(seconds)
    assert asked["parts_hours"] == unknown["parts_hours"] == without["parts_hours"]
    assert (asked["wall_time_hours"] - without["wall_time_hours"]) * 3600 == pytest.approx(seconds)
    assert (asked["gpu_hours"] - without["gpu_hours"]) * 3600 == pytest.approx(2 * seconds), "no server's GPU"
    assert words in asked["how"] and "warm start" not in without["how"]
    assert "without the warm start, known once its demonstrations are validated" in unknown["how"]
