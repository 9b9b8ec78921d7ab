"""The plan: three worked cases of other systems, and properties over random settings."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_core.data.order import Schedule, training_order
from grpo_core.planning.plan import PlanError, make_plan
from grpo_core.planning.rules import PlanInputs


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
    changes = [fix.changes for fix in error.value.fixes]
    assert {"num_generations": 7} in changes
    assert {"gradient_accumulation_steps": 8} in changes


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


def test_dynamic_sampling_states_the_most_that_it_can_cost() -> None:
    plan = make_plan(_inputs(100, 4, 8, max_steps=5, dynamic_sample=True, max_resample_times=3))
    assert (plan.completions, plan.max_completions, plan.max_completion_tokens) == (40, 160, 1600)
    off = make_plan(_inputs(100, 4, 8, max_steps=5, max_resample_times=3))
    assert (off.max_completions, off.max_completion_tokens) == (40, 400)


@pytest.mark.parametrize(("eval_steps", "evaluations"), [(None, 0), (2, 3), (5, 1), (1, 5), (9, 1)])
def test_evaluations_come_every_so_many_updates_and_after_the_last(eval_steps: int | None, evaluations: int) -> None:
    assert make_plan(_inputs(100, 4, 8, max_steps=5, eval_steps=eval_steps)).evaluations == evaluations


SETTINGS = st.builds(
    lambda batch, **rest: PlanInputs(**rest, **dict([batch])),
    batch=st.tuples(st.sampled_from(["steps_per_generation", "generation_batch_size"]), st.none() | st.integers(1, 60)),
    num_prompts=st.integers(1, 99),
    num_generations=st.integers(1, 6),
    per_device_train_batch_size=st.integers(1, 8),
    max_completion_length=st.just(10),
    num_processes=st.integers(1, 3),
    gradient_accumulation_steps=st.integers(1, 5),
    num_iterations=st.integers(1, 3),
    num_train_epochs=st.sampled_from([0.5, 1.0, 2.0, 2.3]),
    max_steps=st.none() | st.integers(1, 20),
)


@given(SETTINGS)
def test_a_plan_is_refused_just_when_a_rule_is_broken(inputs: PlanInputs) -> None:
    per_micro_step = inputs.per_device_train_batch_size * inputs.num_processes
    steps = inputs.steps_per_generation or inputs.gradient_accumulation_steps
    batch, g = inputs.generation_batch_size or per_micro_step * steps, inputs.num_generations
    if batch % per_micro_step == 0 and batch % g == 0 and g >= 2 and inputs.num_prompts >= batch // g:
        assert make_plan(inputs).generation_batch_size == batch
        return
    with pytest.raises(PlanError):
        make_plan(inputs)


@st.composite
def valid_inputs(draw: st.DrawFn) -> PlanInputs:
    """A generation batch of whole groups by construction; a group may straddle processes, an update rollouts."""
    b, w, g = draw(st.integers(1, 8)), draw(st.integers(1, 3)), draw(st.integers(2, 8))
    s = g // math.gcd(b * w, g) * draw(st.integers(1, 3))
    batch = draw(st.sampled_from([{"steps_per_generation": s}, {"generation_batch_size": b * w * s}]))
    return _inputs(
        b * w * s // g + draw(st.integers(0, 60)),
        g,
        b,
        num_processes=w,
        gradient_accumulation_steps=draw(st.integers(1, 5)),
        num_iterations=draw(st.integers(1, 3)),
        num_train_epochs=draw(st.sampled_from([0.5, 1.0, 2.0, 2.3])),
        max_steps=draw(st.none() | st.integers(1, 20)),
        **batch,
    )


@given(valid_inputs())
def test_stepping_through_a_plan_does_exactly_what_it_says(inputs: PlanInputs) -> None:
    plan = make_plan(inputs)
    a, s = inputs.gradient_accumulation_steps, inputs.steps_per_generation or inputs.gradient_accumulation_steps
    if inputs.generation_batch_size:
        s = inputs.generation_batch_size // (inputs.per_device_train_batch_size * inputs.num_processes)
    prompts = inputs.per_device_train_batch_size * inputs.num_processes * s // inputs.num_generations
    chunks = len(range(0, inputs.num_prompts - prompts + 1, prompts))
    epoch = [(chunk, part) for chunk in range(chunks) for _ in range(inputs.num_iterations) for part in range(s)]
    updates = [epoch[start : start + a] for start in range(0, len(epoch), a)]
    assert plan.max_steps == (inputs.max_steps or math.ceil(inputs.num_train_epochs * len(updates)))
    expected = [
        [(step // len(updates) * chunks + chunk, part) for chunk, part in updates[step % len(updates)]]
        for step in range(plan.max_steps)
    ]
    walked = [[(m.rollout, m.slice) for m in plan.micro_steps(step)] for step in range(plan.max_steps)]
    assert walked == expected
    used = {rollout for update in expected for rollout, _ in update}
    assert used == set(range(plan.rollouts))
    assert plan.completions == len(used) * prompts * inputs.num_generations
    assert plan.dropped_prompts_per_epoch == inputs.num_prompts - chunks * prompts
    for updates_done in range(plan.max_steps + 1):
        rollouts = {rollout for update in expected[:updates_done] for rollout, _ in update}
        assert plan.counts(updates_done) == {
            "updates": updates_done,
            "rollouts": len(rollouts),
            "prompts_seen": len(rollouts) * prompts,
            "prompts_dropped": len(rollouts) // chunks * (inputs.num_prompts - chunks * prompts),
            "completions": len(rollouts) * prompts * inputs.num_generations,
        }
    assert plan.counts(plan.max_steps)["prompts_seen"] == plan.prompts_seen
    assert plan.counts(plan.max_steps)["prompts_dropped"] == plan.prompts_dropped
    updates_of = {rollout: [rollout in [r for r, _ in update] for update in expected].count(True) for rollout in used}
    assert not plan.on_policy or set(updates_of.values()) == {1}


@pytest.mark.parametrize(
    ("micro_steps", "slices", "iterations", "on_policy"),
    [(2, 2, 1, True), (4, 2, 1, True), (4, 2, 2, True), (1, 2, 1, False), (3, 2, 1, False), (6, 2, 2, False)],
)
def test_a_plan_is_on_policy_if_no_rollout_reaches_into_a_second_update(
    micro_steps: int, slices: int, iterations: int, on_policy: bool
) -> None:
    keys = {"gradient_accumulation_steps": micro_steps, "num_iterations": iterations}
    assert make_plan(_inputs(96, 4, 8, steps_per_generation=slices, **keys)).on_policy == on_policy


@given(valid_inputs(), st.integers(0, 2**31 - 1))
def test_an_epoch_samples_no_prompt_twice_and_trains_every_completion_once_a_pass(
    inputs: PlanInputs, seed: int
) -> None:
    plan = make_plan(inputs)
    for epoch in range(2):
        rollouts = range(epoch * plan.rollouts_per_epoch, (epoch + 1) * plan.rollouts_per_epoch)
        rows = [row for rollout in rollouts for row in Schedule(plan, seed).prompts(rollout)]
        assert len(set(rows)) == len(rows) == plan.num_prompts - plan.dropped_prompts_per_epoch
        assert set(rows) <= set(range(plan.num_prompts))
    order = training_order(plan, seed, 0)
    shape = (plan.steps_per_generation, plan.num_processes, plan.per_device_train_batch_size)
    assert order.shape == shape
    assert sorted(order.flatten().tolist()) == list(range(plan.generation_batch_size))
