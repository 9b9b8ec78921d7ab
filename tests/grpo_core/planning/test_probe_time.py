"""The time of a probe in the forecast, against direct calculation."""

from __future__ import annotations

import dataclasses
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
