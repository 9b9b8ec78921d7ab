"""The plan: three worked cases of other systems, and properties over random settings."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_core.plan import PlanError, PlanInputs, make_plan


def _inputs(n: int, g: int, b: int, **rest: Any) -> PlanInputs:
    return PlanInputs(n, g, b, max_completion_length=10, **rest)


def test_trl_case() -> None:
    plan = make_plan(_inputs(8000, 6, 4, gradient_accumulation_steps=2, num_processes=3, num_train_epochs=2))
    assert plan.generation_batch_size == 24
    assert plan.prompts_per_generation == 4
    assert plan.expanded_dataset_size == 48_000
    assert plan.updates_per_epoch == 2000
    assert plan.max_steps == 4000


@pytest.mark.parametrize("accumulation", [1, 2, 4])
def test_open_r1_case_is_refused_with_the_reason(accumulation: int) -> None:
    with pytest.raises(PlanError, match="not divisible by num_generations=8") as error:
        make_plan(_inputs(8000, 8, 1, num_processes=7, gradient_accumulation_steps=accumulation))
    assert {"num_generations": 7} in error.value.fixes
    assert {"gradient_accumulation_steps": 8} in error.value.fixes


def test_open_r1_case_works_with_accumulation_8() -> None:
    plan = make_plan(_inputs(8000, 8, 1, num_processes=7, gradient_accumulation_steps=8))
    assert plan.generation_batch_size == 56


@pytest.mark.parametrize(
    ("prompts", "epochs", "max_steps", "dropped"), [(7920, 1, 1320, 0), (7920, 3, 3960, 0), (8000, 1, 1332, 8)]
)
def test_swift_case(prompts: int, epochs: float, max_steps: int, dropped: int) -> None:
    plan = make_plan(
        _inputs(
            prompts,
            8,
            8,
            num_processes=6,
            gradient_accumulation_steps=2,
            num_iterations=2,
            num_train_epochs=epochs,
        )
    )
    assert (plan.max_steps, plan.dropped_prompts_per_epoch) == (max_steps, dropped)
    if prompts == 7920:
        assert (plan.generation_batch_size, plan.prompts_per_generation, plan.micro_steps_per_epoch) == (96, 12, 2640)


def test_fewer_prompts_than_a_generation_batch_are_refused() -> None:
    with pytest.raises(PlanError, match="3 prompts do not fill one generation batch of 4"):
        make_plan(_inputs(3, 4, 16))


def test_a_generation_batch_that_is_no_whole_number_of_micro_steps_is_refused() -> None:
    with pytest.raises(PlanError, match="generation_batch_size=20 is not a multiple of"):
        make_plan(_inputs(100, 4, 8, generation_batch_size=20))


@pytest.mark.parametrize(("warmup", "steps"), [(0, 0), (0.1, 5), (0.11, 6), (7, 7)])
def test_warm_up_below_one_is_a_share_of_the_run(warmup: float, steps: int) -> None:
    assert make_plan(_inputs(100, 4, 8, max_steps=50, warmup_steps=warmup)).warmup_steps == steps


def test_an_early_stop_counts_the_rollouts_it_needs() -> None:
    plan = make_plan(_inputs(100, 4, 8, steps_per_generation=4, num_iterations=2, max_steps=9))
    assert (plan.rollouts, plan.completions, plan.max_completion_tokens) == (2, 64, 640)


SETTINGS = st.builds(
    PlanInputs,
    num_prompts=st.integers(1, 60),
    num_generations=st.integers(1, 8),
    per_device_train_batch_size=st.integers(1, 8),
    max_completion_length=st.just(10),
    num_processes=st.integers(1, 3),
    gradient_accumulation_steps=st.integers(1, 5),
    steps_per_generation=st.none() | st.integers(1, 5),
    num_iterations=st.integers(1, 3),
    num_train_epochs=st.sampled_from([0.5, 1.0, 2.0, 2.3]),
    max_steps=st.none() | st.integers(1, 20),
)


@given(SETTINGS)
def test_stepping_through_a_plan_does_exactly_what_it_says(inputs: PlanInputs) -> None:
    try:
        plan = make_plan(inputs)
    except PlanError as error:
        for fix in error.fixes:
            make_plan(dataclasses.replace(inputs, **fix))
        return
    if inputs.max_steps is None:
        per_epoch = math.ceil(plan.micro_steps_per_epoch / plan.gradient_accumulation_steps)
        assert plan.max_steps == math.ceil(inputs.num_train_epochs * per_epoch)
    walked = [(m.rollout, m.slice) for step in range(plan.max_steps) for m in plan.micro_steps(step)]
    whole = [
        (rollout, s)
        for rollout in range(plan.rollouts)
        for _ in range(plan.num_iterations)
        for s in range(plan.steps_per_generation)
    ]
    assert walked == whole[: len(walked)]
    assert {rollout for rollout, _ in walked} == set(range(plan.rollouts))
    assert all(len(list(plan.micro_steps(step))) > 0 for step in range(plan.max_steps))
    if plan.on_policy:
        assert all(
            plan.num_iterations * plan.steps_per_generation == sum(m.rollout == rollout for m in plan.micro_steps(step))
            for step in range(plan.max_steps)
            for rollout in {m.rollout for m in plan.micro_steps(step)}
        )


def test_planning_needs_no_torch() -> None:
    code = "import sys, flows.cli, grpo_core.plan; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
