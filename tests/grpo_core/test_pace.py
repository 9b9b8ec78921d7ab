"""The measured pace: what is asked for is run, and what is too much is extrapolated to what running it would take."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from grpo_core import pace
from grpo_core.config.files import parse_config
from grpo_core.planning.pace import Pace, PaceRequest, pace_request
from grpo_core.planning.plan import make_plan, plan_inputs
from grpo_core.planning.shapes import PromptLengths
from grpo_core.rollout.types import Completion
from tests.conftest import config_values, make_model, write_sums
from tests.grpo_core.training.killing import in_child


@pytest.fixture
def request_(smooth_model_folder: Path, tmp_path: Path) -> PaceRequest:
    write_sums(tmp_path / "train.parquet", 0, 40)
    config = parse_config(config_values(smooth_model_folder, tmp_path))
    plan = make_plan(plan_inputs(config, 40))
    prompts = tmp_path / "train.parquet"
    return pace_request(config, plan, PromptLengths(4.0, 6, "given"), prompts, tmp_path, 1, "")


def test_a_small_model_answers_its_own_prompts(request_: PaceRequest) -> None:
    found = pace.measure(request_, time.time())
    for seconds in (found.sample_seconds, found.train_seconds, found.step_seconds, found.byte_seconds):
        assert 0 < seconds < 60
    assert found.completions == 16  # the generation batch of two micro-steps of 8
    assert 1 <= found.completion_tokens <= 6
    assert "measured on this CPU" in found.how and "with the model:" in found.how


def test_without_prompts_completions_have_full_length(request_: PaceRequest) -> None:
    found = pace.measure(replace(request_, prompts=""), time.time())
    assert found.completion_tokens == 6
    assert "completions of full length (6 tokens)" in found.how


def test_of_a_large_model_two_slices_tell_the_time_of_all_layers(
    request_: PaceRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model of which each layer takes 2 s to sample from, 3 s to train and 1 s to step, and the rest 10, 20 and 5."""
    depths = []

    def measure_model(request: PaceRequest, base: Any, tokenizer: Any, prompts: list[list[int]]) -> Any:
        layers = base.config.num_hidden_layers
        depths.append(layers)
        return pace._Seconds(10 + 2 * layers, 20 + 3 * layers, 5 + layers), 6.0, 100.0

    monkeypatch.setattr(pace, "_measure_model", measure_model)
    monkeypatch.setattr(pace, "WHOLE", 1000)
    monkeypatch.setattr(pace, "FEWEST_LAYERS", 2)
    found = pace.measure(request_, 90.0)
    assert depths == [1, 2]
    assert (found.sample_seconds, found.train_seconds, found.step_seconds) == (14, 26, 7)  # its 2 layers
    assert found.start_seconds >= 10


LINEAR, FULL = "linear_attention", "full_attention"


@pytest.mark.parametrize(
    ("kinds", "period"),
    [
        *(([], 1), ([FULL] * 5, 1), ([LINEAR, LINEAR, FULL] * 3, 3), ([LINEAR, FULL, LINEAR], 2)),
        (["sliding_attention", FULL] * 9, 1),  # carries no state
        ([LINEAR] * 20 + [FULL], 1),  # nothing repeats: a large model is not loaded whole for that
    ],
)
def test_a_slice_has_the_layers_after_which_kinds_repeat(kinds: list[str], period: int) -> None:
    assert pace._period(kinds) == period


def test_of_a_large_hybrid_the_slices_have_layers_of_each_kind(
    request_: PaceRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8}
    kinds = {"layer_types": ["linear_attention", "full_attention"] * 3, "num_hidden_layers": 6}
    base = make_model(tmp_path / "hybrid", "Qwen3_5Text", head_dim=16, linear_value_head_dim=8, **linear, **kinds)
    monkeypatch.setattr(pace, "WHOLE", 1000)
    found = pace.measure(replace(request_, model={"name_or_path": str(base)}), time.time())
    assert "2 and 4 of its 6 layers" in found.how


@pytest.mark.parametrize("broken", [True, False])
def test_weights_that_the_training_would_refuse_are_refused(
    broken: bool,
    request_: PaceRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    base = make_model(tmp_path / "base")
    if broken:
        weights = load_file(base / "model.safetensors")
        weights["model.norm.weight"][0] = float("nan")
        save_file(weights, base / "model.safetensors", {"format": "pt"})
    asked = replace(request_, model={"name_or_path": str(base)})
    monkeypatch.setattr(sys, "argv", ["pace", json.dumps(vars(asked)), str(time.time())])
    pace.main()
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert ("model.norm.weight" in found.get("refused", "")) == broken


class SlowEngine:
    """Takes a second per step and two for the first, by its own clock; the first request is done after four steps."""

    def __init__(self) -> None:
        self.now = 0.0

    def generate(self, requests: Any, sampling: Any) -> Any:
        for step in range(sampling.max_tokens):
            self.now += 2.0 if step == 0 else 1.0
            done = [Completion([7] * 4, [0.0] * 4, truncated=False)] * requests[0].num_completions
            yield [(0, done)] if step == 3 else []


@pytest.mark.parametrize(
    ("budget", "seconds", "mean"), [(1000.0, 101.0, 52.0), (5.5, 101.0, 52.0), (3.5, 101.0, 100.0)]
)
def test_sampling_that_takes_too_long_is_extrapolated_at_full_length(
    monkeypatch: pytest.MonkeyPatch, budget: float, seconds: float, mean: float
) -> None:
    """100 steps take 101 s, whether they are made, or follow from the first few."""
    from grpo_core.rollout.types import Request, Sampling

    engine = SlowEngine()
    monkeypatch.setattr(pace.time, "perf_counter", lambda: engine.now)
    monkeypatch.setattr(pace, "SAMPLING_SECONDS", budget)
    monkeypatch.setattr(pace, "REPEATS", 1)
    found, lengths = pace._sample(engine, [Request([1], 2, 0), Request([2], 2, 2)], Sampling(100))
    assert (found, sum(lengths) / len(lengths)) == (seconds, mean)


def test_the_process_prints_the_pace_last(
    request_: PaceRequest, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["pace", json.dumps(vars(request_)), str(time.time())])
    assert in_child(pace.main) == 0
    assert Pace(**json.loads(capfd.readouterr().out.splitlines()[-1])).start_seconds > 0
