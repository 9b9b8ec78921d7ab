"""The plan comes true: hundreds of random runs do, step for step, what was planned for them."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from grpo_core.config.files import parse_config
from grpo_core.data.order import Schedule
from grpo_core.planning.plan import make_plan, plan_inputs
from tests.conftest import config_values
from tests.grpo_core.training.several import in_processes
from tests.grpo_core.training.stepping import random_settings, step_through

pytestmark = pytest.mark.served


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    yield Accelerator(cpu=True)
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("seeds", [range(25), pytest.param(range(25, 300), marks=pytest.mark.e2e)])
def test_one_process_does_what_was_planned(
    accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seeds: range
) -> None:
    monkeypatch.setattr("builtins.print", lambda *_, **__: None)
    for seed in seeds:
        settings = random_settings(seed, 1)
        _expect_as_planned(settings, [step_through(settings, accelerator, tmp_path / str(seed))])


# Broken in each update that trains a token: the mean correction is about 1.
LOWERED = {"importance_sampling_ratio_action": "lower_staleness", "min_importance_sampling_ratio": 9.0, "patience": 3}


@pytest.mark.parametrize(
    ("num_processes", "health"),
    [
        pytest.param(1, {}, id="1", marks=pytest.mark.e2e),
        pytest.param(2, {}, id="2", marks=pytest.mark.e2e),
        pytest.param(1, LOWERED, id="1, lowered", marks=pytest.mark.e2e),
        pytest.param(2, LOWERED, id="2, lowered"),
    ],
)
def test_sampling_ahead_trains_every_group_once_in_the_process_where_it_began_and_none_too_late(
    tmp_path: Path, num_processes: int, health: dict[str, Any]
) -> None:
    """However long groups take: a few for longer than the training."""
    staleness = [1, 2, 4, 8]
    settings = [random_settings(seed, num_processes) for seed in range(2000, 2000 + len(staleness))]
    for each, most in zip(settings, staleness, strict=True):
        each["keys"] |= {"max_staleness": most, "engine": "vllm-server", "max_steps": 20, "num_iterations": 1, **health}
    processes = _step_together(settings, num_processes, tmp_path)
    oldest = []
    for n, (each, most) in enumerate(zip(settings, staleness, strict=True)):
        config = parse_config(config_values(Path("model"), Path("data"), **{"max_steps": None, **each["keys"]}))
        plan, own = make_plan(plan_inputs(config, each["num_prompts"])), [process[n] for process in processes]
        taken = Counter(prompt for process in own for batch in process["rollouts"] for prompt, _ in batch)
        scheduled = (row for index in range(plan.rollouts) for row in Schedule(plan, config.seed).prompts(index))
        assert taken == Counter(scheduled), each
        for process in own:
            assert process["result"] == plan.counts(plan.max_steps)
            assert process["left"] == 0
            assert max(process["ages"], default=0) <= most, each
        oldest.append(max(age for process in own for age in process["ages"]))
        started = [seed for process in own for seed in process["started"]]
        assert len(set(started)) == len(started) == plan.rollouts * plan.prompts_per_generation
        lines = [json.loads(line) for line in (tmp_path / f"run-{n}" / "metrics.jsonl").read_text().splitlines()]
        in_force = [line["sampling/max_staleness"] for line in lines]
        assert min(in_force) == (0 if health else most)
    assert health or oldest == staleness  # the limits are used


@pytest.mark.parametrize(
    ("num_processes", "count"), [(2, 6), *(pytest.param(n, 60, marks=pytest.mark.e2e) for n in (2, 3))]
)
def test_several_processes_do_together_what_was_planned(tmp_path: Path, num_processes: int, count: int) -> None:
    settings = [random_settings(seed, num_processes) for seed in range(1000, 1000 + count)]
    processes = _step_together(settings, num_processes, tmp_path)
    for n, each in enumerate(settings):
        _expect_as_planned(each, [process[n] for process in processes])


@pytest.mark.parametrize("num_processes", [pytest.param(1, marks=pytest.mark.e2e), 2])
def test_a_curriculum_does_what_was_planned_and_is_the_same_in_all_processes(
    tmp_path: Path, num_processes: int
) -> None:
    kinds = [{"kind": "easy_to_hard"}, {"kind": "band", "band": [0.4, 0.6]}, {"kind": "variance"}]
    settings = [random_settings(seed, num_processes) for seed in range(3000, 3006)]
    for each, kind in zip(settings, itertools.cycle(kinds), strict=False):
        each["keys"] |= {"num_train_epochs": 3.0, "max_steps": None}
        each["curriculum"] = kind
    processes = _step_together(settings, num_processes, tmp_path)
    for n, each in enumerate(settings):
        _expect_as_planned(each, [process[n] for process in processes])


def _step_together(settings: list[dict[str, Any]], num_processes: int, folder: Path) -> list[list[dict[str, Any]]]:
    """What each process did, by settings."""

    def step(rank: int) -> None:
        accelerator = Accelerator(cpu=True)
        done = [step_through(each, accelerator, folder / f"run-{n}") for n, each in enumerate(settings)]
        (folder / f"{rank}.json").write_text(json.dumps(done))

    in_processes(num_processes, folder, step)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(num_processes)]


def _expect_as_planned(settings: dict[str, Any], processes: list[dict[str, Any]]) -> None:
    """What the processes did is what the plan says, and what these few lines do by themselves."""
    keys, num_prompts = settings["keys"], settings["num_prompts"]
    config = parse_config(config_values(Path("model"), Path("data"), **{"max_steps": None, **keys}))
    plan = make_plan(plan_inputs(config, num_prompts))
    updates, micro_steps, rollouts = _simulated(keys, num_prompts)
    planned = dataclasses.asdict(plan)
    assert (planned["max_steps"], planned["rollouts"]) == (updates, rollouts), settings
    sampled = [list(itertools.chain(*(process["rollouts"][n] for process in processes))) for n in range(rollouts)]
    for process in processes:
        assert (process["updates"], process["micro_steps"]) == (updates, micro_steps), settings
        assert len(process["rollouts"]) == rollouts
        assert process["result"] == plan.counts(updates)
    groups = [Counter() for _ in sampled]
    for group, requests in zip(groups, sampled, strict=True):
        for prompt, completions in requests:
            group[prompt] += completions
    assert all(set(group.values()) == {plan.num_generations} for group in groups)
    assert sum(sum(group.values()) for group in groups) == plan.completions
    for start in range(0, rollouts, plan.rollouts_per_epoch):
        epoch = [prompt for group in groups[start : start + plan.rollouts_per_epoch] for prompt in group]
        assert len(epoch) == len(set(epoch)) <= num_prompts - plan.dropped_prompts_per_epoch


def _simulated(keys: dict[str, Any], num_prompts: int) -> tuple[int, int, int]:
    """Updates, micro-steps and rollouts of a run, by walking through it."""
    b, w, a = (keys[k] for k in ("per_device_train_batch_size", "num_processes", "gradient_accumulation_steps"))
    batch = keys.get("generation_batch_size") or b * w * keys.get("steps_per_generation", a)
    chunks, s = num_prompts // (batch // keys["num_generations"]), batch // (b * w)
    epoch = [chunk for chunk in range(chunks) for _ in range(keys["num_iterations"] * s)]
    updates = [epoch[start : start + a] for start in range(0, len(epoch), a)]
    total = keys["max_steps"] or math.ceil(keys["num_train_epochs"] * len(updates))
    walked = [(step // len(updates), chunk) for step in range(total) for chunk in updates[step % len(updates)]]
    return total, len(walked), len(set(walked))
