"""The fixes of a refused run are valid, honest about what they change, and the near ones are not missed."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, get_args

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from grpo_core.planning.frameworks.legacy_trl import LEGACY
from grpo_core.planning.plan import PlanError, make_plan
from grpo_core.planning.rules import PlanInputs, Rules, problems
from grpo_core.planning.suggestions import _changes, _pairs, fixes

KEYS = ("num_generations", "per_device_train_batch_size", "num_processes", "gradient_accumulation_steps")


def _inputs(*values: Any, rules: Rules = "grpo", **more: Any) -> PlanInputs:
    return LEGACY.get(rules, PlanInputs)(*values, rules=rules, **more)


@st.composite
def refused(draw: st.DrawFn) -> PlanInputs:
    """A run of any system that breaks a rule."""
    rules: Rules = draw(st.sampled_from(get_args(Rules)))
    batch: dict[str, Any] = {}
    if rules not in LEGACY:
        batch = draw(
            st.sampled_from([{}, {"steps_per_generation": 3}, {"generation_batch_size": 20}])
            | st.just({"steps_per_generation": 2, "generation_batch_size": 24})
        )
    inputs = LEGACY.get(rules, PlanInputs)(
        num_prompts=draw(st.integers(1, 200)),
        num_generations=draw(st.integers(1, 12)),
        per_device_train_batch_size=draw(st.integers(1, 16)),
        max_completion_length=10,
        num_processes=draw(st.integers(1, 8)),
        gradient_accumulation_steps=draw(st.integers(1, 8)),
        rules=rules,
        per_device_eval_batch_size=None if rules == "grpo" else draw(st.none() | st.integers(1, 9)),
        num_generations_eval=draw(st.none() | st.integers(1, 4)),
        **batch,
    )
    assume(problems(inputs))
    return inputs


@given(refused())
def test_every_fix_is_valid_and_says_truly_what_it_changes(inputs: PlanInputs) -> None:
    found = fixes(inputs)
    assert [fix.cost for fix in found] == sorted(fix.cost for fix in found)
    for fix in found:
        mended = dataclasses.replace(inputs, **fix.changes)
        make_plan(mended)
        assert fix.changes
        assert all(getattr(inputs, key) != value for key, value in fix.changes.items())
        assert fix.generation_batch_size == mended.prompt_batch
        assert fix.keeps_generation_batch == (mended.prompt_batch == inputs.prompt_batch)


@given(refused())
def test_no_nearer_change_of_one_key_is_missed(inputs: PlanInputs) -> None:
    distances = []
    for key in KEYS:
        present = getattr(inputs, key)
        for value in range(1, 4 * max(present, inputs.num_generations) + 1):
            mended = dataclasses.replace(inputs, **{key: value})
            if not problems(mended):
                ratio = math.log2(mended.prompt_batch / inputs.prompt_batch)
                distances.append(1 + abs(math.log2(value / present)) + abs(ratio))
    assert not distances or fixes(inputs)[0].cost <= min(distances) + 1e-3


def _open_r1(**changes: Any) -> PlanInputs:
    return _inputs(8000, 8, 1, max_completion_length=10, num_processes=7, **changes)


def test_the_nearest_fix_comes_first() -> None:
    first = fixes(_open_r1())[0]
    assert (first.changes, first.keeps_generation_batch) == ({"num_generations": 7}, True)


def test_under_the_rule_of_2025_the_same_batch_can_be_cut_otherwise() -> None:
    found = fixes(_open_r1(gradient_accumulation_steps=8, rules="trl-0.16"))
    changes = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
    assert changes in [fix.changes for fix in found if fix.keeps_generation_batch]


def test_an_evaluation_batch_alone_is_mended_alone() -> None:
    inputs = PlanInputs(100, 4, 4, max_completion_length=10, rules="trl-1.16", per_device_eval_batch_size=3)
    found = fixes(inputs)
    assert {"per_device_eval_batch_size": 4} in [fix.changes for fix in found]
    assert found[0].keeps_generation_batch
    with pytest.raises(PlanError, match="per_device_eval_batch_size=4"):
        make_plan(inputs)


def test_two_keys_change_where_one_is_not_enough() -> None:
    inputs = PlanInputs(1, 6, 8, max_completion_length=10, num_processes=3, gradient_accumulation_steps=5)
    assert fixes(inputs)


@pytest.mark.parametrize("field", ["num_generations", "gradient_accumulation_steps", "num_train_epochs", "max_steps"])
@pytest.mark.parametrize("value", [0, -2])
@pytest.mark.parametrize("rules", get_args(Rules))
def test_a_value_that_is_not_positive_is_named(field: str, value: int, rules: Rules) -> None:
    inputs = dataclasses.replace(_inputs(100, 4, 4, max_completion_length=10, rules=rules), **{field: value})
    with pytest.raises(PlanError, match=rf"{field}={value} is not positive"):
        make_plan(inputs)


NUMBERS = st.integers(1, 20) | st.integers(1, 10**18) | st.sampled_from([10**18, 2**59, 10_007, 10**18 - 11])


@settings(max_examples=25)
@given(
    st.builds(
        _inputs,
        *[NUMBERS] * 4,
        num_processes=NUMBERS,
        gradient_accumulation_steps=NUMBERS,
        steps_per_generation=st.none() | NUMBERS,
        generation_batch_size=st.none() | NUMBERS,
        warmup_steps=st.just(0) | NUMBERS,
        per_device_eval_batch_size=st.none() | NUMBERS,
        num_generations_eval=st.none() | NUMBERS,
        rules=st.sampled_from(get_args(Rules)),
    )
)
def test_the_search_has_a_bound_and_its_fixes_are_valid_whatever_the_numbers(inputs: PlanInputs) -> None:
    assert sum(1 for tried in (_changes, _pairs) for _ in tried(inputs)) < 15_000
    for fix in fixes(inputs):
        assert make_plan(dataclasses.replace(inputs, **fix.changes)).max_steps > 0


def test_one_value_beyond_reach_is_mended_by_the_nearest_that_is_not() -> None:
    inputs = PlanInputs(8000, 8, 10**18 - 11, max_completion_length=10, num_processes=4)
    assert {"per_device_train_batch_size": 16_000} in [fix.changes for fix in fixes(inputs)]


@pytest.mark.parametrize("value", [10**19, math.inf, math.nan])
def test_numbers_that_no_run_has_are_refused(value: float) -> None:
    inputs = PlanInputs(8000, 8, 8, max_completion_length=10, num_train_epochs=value)
    with pytest.raises(PlanError, match=r"num_train_epochs=\S+ is (beyond 1e\+18|not positive)"):
        make_plan(inputs)


def test_a_warm_up_longer_than_the_run_is_refused_before_it() -> None:
    inputs = PlanInputs(640, 8, 8, max_completion_length=10, warmup_steps=1000)
    with pytest.raises(PlanError, match="warmup_steps=1000 is longer than the run's 640 updates") as error:
        make_plan(inputs)
    assert [fix.changes for fix in error.value.fixes] == [{"warmup_steps": 640}]
    assert make_plan(dataclasses.replace(inputs, warmup_steps=640)).warmup_steps == 640
    assert make_plan(dataclasses.replace(inputs, rules="trl-1.16")).warmup_steps == 1000


@pytest.mark.parametrize("batch", [{"per_device_train_batch_size": 1_000_003}, {"generation_batch_size": 65_536}])
def test_absurdly_large_batches_are_mended_too(batch: dict[str, int]) -> None:
    inputs = PlanInputs(
        **{"num_prompts": 80_000, "num_generations": 24, "per_device_train_batch_size": 8} | batch,
        max_completion_length=10,
        num_processes=8,
    )
    assert fixes(inputs)
