"""Advice on sampling ahead: the speed of servers from a training in turn, and what is simulated with it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from grpo_core.config.files import parse_config
from grpo_core.planning.ahead_forecast import EarlierSampling, SampledBatch, advise, fit_speed
from grpo_core.planning.forecast import forecast, forecast_rows
from grpo_core.planning.plan import make_plan, plan_inputs
from grpo_core.planning.sampling_ahead import Speed, simulate
from grpo_core.planning.shapes import PromptLengths
from tests.conftest import config_values

GROUP, PROMPTS = 4, 8


def _earlier(sigma: float, speed: Speed, servers: int = 1, batches: int = 12) -> EarlierSampling:
    """What a training in turn would measure with servers of this speed, and completions of this spread."""
    draw, found = random.Random(0), []
    for _ in range(batches):
        lengths = [[min(1 + int(draw.lognormvariate(4.0, sigma)), 2000) for _ in range(GROUP)] for _ in range(PROMPTS)]
        groups = [[[(length, 0.0)] for length in group] for group in lengths]
        alone = simulate(groups, PROMPTS, 0, servers, 256, speed)
        found.append(SampledBatch(lengths, 10.0, alone.waited, alone.seconds - alone.waited))
    return EarlierSampling(found, servers, 1, "from a test")


def _advice(earlier: EarlierSampling, **keys: Any) -> dict[str, Any]:
    values = config_values(Path("model"), Path("data"), engine="vllm-server", num_generations=GROUP, max_steps=20)
    values["train"] |= {"per_device_train_batch_size": GROUP * PROMPTS, "gradient_accumulation_steps": 1}
    values["rollout"] |= {"max_completion_length": 2000, **keys}
    config = parse_config(values)
    return advise(config, make_plan(plan_inputs(config, 1000)), earlier, 256)


def test_the_speed_of_servers_follows_from_the_seconds_and_lengths_of_a_training_in_turn() -> None:
    speed = Speed(step=0.02, sequence=0.001, update=3.0, token=0.002)
    found = fit_speed(_earlier(0.8, speed), 256)
    assert (found.step, found.sequence) == (pytest.approx(0.02), pytest.approx(0.001))
    assert (found.update, found.token) == (pytest.approx(3.0), pytest.approx(0.002))
    # Seconds that no line without negative parts fits, and batches that are all alike, give a speed all the same.
    batches = [SampledBatch([[10, 10 * n]], 0.0, 1.0 / n, 1.0) for n in (1, 2, 3)]
    odd = fit_speed(EarlierSampling(batches, 1, 1, ""), 256)
    assert odd.step == 0 < odd.sequence
    same = fit_speed(EarlierSampling([SampledBatch([[5, 5]], 0.0, 1.0, 2.0)] * 3, 1, 1, ""), 256)
    assert (same.step, same.sequence, same.update, same.token) == (0.2, 0.0, 2.0, 0.0)


def test_long_tails_are_advised_more_staleness_than_even_completions() -> None:
    even = _advice(_earlier(0.05, Speed(0.02, 0.0, update=4.0)))
    tailed = _advice(_earlier(1.2, Speed(0.02, 0.0, update=4.0)))
    assert even["max_staleness"] == 1
    assert tailed["max_staleness"] > 1
    paces = tailed["updates_per_hour"]
    assert paces[tailed["max_staleness"]] > 1.2 * paces[1] > 1.2 * paces[0]


def test_servers_are_advised_until_the_trainer_no_longer_waits_for_them() -> None:
    """Where a step takes twice as long with twice as many sequences, two servers sample twice as fast."""
    found = _advice(_earlier(0.05, Speed(0.0, 0.001, update=1.2)), vllm_num_servers=2)
    assert found["servers"] == 2
    assert found["waiting_share"][1] > 0.2 > 0.1 > found["waiting_share"][2]
    assert [*found["waiting_share"]] == [1, 2, 4]


def test_the_forecast_says_that_it_is_simulated_or_what_is_missing() -> None:
    config = parse_config(config_values(Path("model"), Path("data"), engine="vllm-server", max_steps=20))
    plan = make_plan(plan_inputs(config, 1000))
    for sampling in (_earlier(0.5, Speed(0.02, 0.0, update=4.0)), "not trained yet", None):
        found = forecast(config, plan, PromptLengths(6, 6, "given"), "", [], None, sampling=sampling)
        rows = {what.strip(): (value, how) for what, value, how in forecast_rows(found)}
        if sampling is None:
            assert "sampling ahead" not in rows
        elif isinstance(sampling, str):
            assert rows["sampling ahead"] == ("unknown until a first run", sampling)
        else:
            value, how = rows["sampling ahead"]
            assert value.startswith(f"max_staleness = {found['sampling_ahead']['max_staleness']}; updates per hour 0: ")
            assert how.startswith("simulated, not run, with 1 server: from a test")
            assert "the trainer waits" in rows["vLLM servers"][0]
