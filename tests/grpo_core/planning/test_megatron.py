"""Plans of Megatron-SWIFT recipes, held against what ms-swift's own functions compute.

plans/megatron/swift-4.6.jsonl holds random settings with the figures of resolve_generation_batch_size,
validate_batch_dp_alignment, _init_distributed and init_iters (swift/megatron/arguments/megatron_args.py:261, 298, 944,
1039), run as they are, and of the two assertions on prompts and shares in swift/megatron/trainers/grpo_trainer.py:1325
and 1351. `figures` null: refused there, or no update.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_core.planning.frameworks.launches import RecipeError
from grpo_core.planning.frameworks.megatron import MegatronInputs, megatron_notes, megatron_plan
from grpo_core.planning.frameworks.recipes import Recipe, megatron_inputs, read_recipe
from grpo_core.planning.plan import PlanError

CASES = [
    json.loads(line)
    for line in (Path(__file__).parent / "plans" / "megatron" / "swift-4.6.jsonl").read_text().splitlines()
]


def test_the_figures_are_those_of_ms_swift_itself() -> None:
    assert len(CASES) >= 100
    for case in CASES:
        recipe = Recipe("swift-4.6", case["arguments"], {"world_size": case["world_size"]}, "megatron")
        try:
            plan = megatron_plan(megatron_inputs(recipe, [case["num_prompts"]], {}))
        except PlanError:
            found = None
        else:
            found = {"generation_batch_size": plan.generation_batch_size, "max_steps": plan.max_steps}
            w, s = plan.num_processes, plan.steps_per_generation
            assert plan.generation_batch_size == plan.per_device_train_batch_size * w * s
            assert plan.effective_batch_size == plan.per_device_train_batch_size * w * plan.gradient_accumulation_steps
        assert found == case["figures"], case


def _read(folder: Path, options: str, **given: Any) -> MegatronInputs:
    path = folder / "run.sh"
    path.write_text(f"NPROC_PER_NODE=8 \\\nmegatron rlhf --rlhf_type grpo {options}\n")
    return megatron_inputs(read_recipe(path, "swift-4.6"), [None], {"num_prompts": 10_000, **given})


def test_a_launch_script(tmp_path: Path) -> None:
    # 8 replicas · b = 4: 10000//32·32 = 9984 prompts · 8 // 128 = 624 updates; 128·4 = 512 completions, 64 prompts
    options = "--global_batch_size 128 --micro_batch_size 4 --steps_per_generation 4 --num_train_epochs 1"
    inputs = _read(tmp_path, f"{options} --train_iters 100 --lr_warmup_fraction 0.05")
    plan = megatron_plan(inputs)
    assert (plan.generation_batch_size, plan.prompts_per_generation, plan.max_steps) == (512, 64, 624)
    assert (plan.rollouts, plan.dropped_prompts_per_epoch, plan.warmup_steps) == (156, 16, 32)
    assert any("train_iters=100 does not count" in note for note in megatron_notes(inputs, plan))
    iterations = _read(tmp_path, "--global_batch_size 128 --train_iters 100")
    assert megatron_plan(iterations).max_steps == 100


def test_processes_that_hold_one_model_together_are_one_replica(tmp_path: Path) -> None:
    inputs = _read(
        tmp_path, "--tensor_model_parallel_size 4 --num_generations 4 --num_train_epochs 1", num_processes=16
    )
    plan = megatron_plan(inputs)
    assert plan.num_processes == 4
    assert "4 replicas of the model that 16 processes hold (tensor 4 · pipeline 1" in megatron_notes(inputs, plan)[-1]


def test_a_last_rollout_beyond_the_data_feeds_one_update() -> None:
    # 104 prompts, 16 a rollout of 4 updates: train_iters is 26; the 7th rollout needs 8 prompts of another epoch
    inputs = MegatronInputs(104, global_batch_size=32, steps_per_generation=4, num_train_epochs=1)
    plan = megatron_plan(inputs)
    assert (plan.max_steps, inputs.updates_done, plan.rollouts) == (26, 25, 7)
    assert any("26 updates are planned but the run ends after 25" in note for note in megatron_notes(inputs, plan))
    assert dataclasses.replace(inputs, ray=True).updates_done == 26


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("--global_batch_size 64", "neither num_train_epochs nor train_iters is given"),
        (
            "--global_batch_size 12 --train_iters 1",
            "global_batch_size=12 is not a multiple of micro_batch_size·replicas",
        ),
        ("--num_generations 6 --train_iters 1", "not divisible by num_generations=6"),
        ("--num_generations 4 --train_iters 1", "4 prompts .* is not a multiple of micro_batch_size·replicas=1·8"),
        (
            "--tensor_model_parallel_size 3 --train_iters 1",
            "8 processes are not a multiple of the 3 that hold one model",
        ),
        ("--micro_batch_size 0 --train_iters 1", "micro_batch_size=0 is not positive"),
        ("--num_iterations 2 --train_iters 1", "passes over a generation batch once"),
        ("--num_generations 2 --loss_type real --train_iters 1", "loss_type=real needs whole groups"),
        ("--generation_batch_size 24 --train_iters 1", "generation_batch_size=24 is not a multiple of 16"),
    ],
)
def test_a_broken_rule_is_named(tmp_path: Path, options: str, reason: str) -> None:
    with pytest.raises(PlanError, match=reason):
        megatron_plan(_read(tmp_path, options))


def test_settings_of_the_other_trainer_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="Megatron-SWIFT has no gradient_accumulation_steps, max_steps"):
        _read(tmp_path, "--gradient_accumulation_steps 2 --max_steps 9 --train_iters 1")


NUMBERS = st.integers(1, 20) | st.integers(1, 10**18)


@given(
    st.builds(
        MegatronInputs,
        *[NUMBERS] * 4,
        micro_batch_size=NUMBERS,
        global_batch_size=NUMBERS,
        steps_per_generation=st.none() | NUMBERS,
        num_train_epochs=NUMBERS,
        tensor_model_parallel_size=st.integers(1, 4),
    )
)
def test_every_fix_is_valid_whatever_the_numbers(inputs: MegatronInputs) -> None:
    try:
        megatron_plan(inputs)
    except PlanError as error:
        for fix in error.fixes:
            mended = megatron_plan(dataclasses.replace(inputs, **fix.changes))
            assert mended.generation_batch_size == fix.generation_batch_size
            assert fix.keeps_generation_batch == (mended.generation_batch_size == inputs.generation_batch)


def test_a_generation_batch_below_one_update_is_refused_with_what_would_do() -> None:
    inputs = MegatronInputs(
        num_prompts=1000, micro_batch_size=1, global_batch_size=16, train_iters=5, generation_batch_size=8
    )
    with pytest.raises(PlanError, match="generation_batch_size=8 is not a multiple of 16") as refused:
        megatron_plan(inputs)
    assert {"global_batch_size": 8} in [fix.changes for fix in refused.value.fixes]
