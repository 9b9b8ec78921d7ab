"""Other systems' recipes give the figures that those systems come to when they run.

plans/*.jsonl hold what TRL 1.16.0 (transformers 5.19), 0.17.0 (4.51), 0.16.1 (4.50) and ms-swift 4.6.0 did: their own
`train()` (ms-swift: from its command line on), with sampling, loss and evaluation replaced by counters. `figures` null:
refused, or ended without an update. `num_prompts` counts the rows of the data, before ms-swift splits them.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from pathlib import Path
from typing import Any, get_args

import pytest

from flows.cli.plan import plan
from grpo_core.planning.frameworks.launches import RecipeError
from grpo_core.planning.frameworks.recipes import DEFAULTS, OPTIONS, PROCESSES, Recipe, read_recipe, recipe_inputs
from grpo_core.planning.plan import PlanError, make_plan
from grpo_core.planning.rules import Rules

PLANS = Path(__file__).parent / "plans"
SYSTEMS = sorted(path.stem for path in PLANS.glob("*.jsonl"))


@pytest.mark.parametrize("rules", SYSTEMS)
def test_the_figures_are_those_of_the_system_itself(rules: Rules) -> None:
    cases = [json.loads(line) for line in (PLANS / f"{rules}.jsonl").read_text().splitlines()]
    assert len(cases) >= 50
    for case in cases:
        arguments = dict(case["arguments"])
        num_prompts, processes = arguments.pop("num_prompts"), arguments.pop("num_processes")
        try:
            inputs = recipe_inputs(Recipe(rules, arguments, {"processes": processes}), [num_prompts], {})
            found = {**dataclasses.asdict(make_plan(inputs)), "updates_done": inputs.updates_done}
        except (PlanError, RecipeError):
            found = None
        expected = case["figures"]
        assert (found and {name: found[name] for name in expected or {}}) == expected, case


def test_every_system_has_its_cases() -> None:
    assert set(SYSTEMS) == set(DEFAULTS) == set(get_args(Rules)) - {"grpo"}


def _read(path: Path, text: str, rules: Rules, rows: int | None = None, **given: Any) -> Any:
    path.write_text(text)
    return recipe_inputs(read_recipe(path, rules), [rows], given)


def test_an_open_r1_recipe(tmp_path: Path) -> None:
    text = """
model_name_or_path: Qwen/Qwen2.5-1.5B-Instruct
dataset_name: open-r1/OpenR1-Math-220k
do_eval: false
eval_strategy: no
gradient_accumulation_steps: 4
learning_rate: 2.0e-05
lr_scheduler_type: cosine
max_completion_length: 2048
max_steps: -1
num_generations: 16
num_train_epochs: 1
per_device_eval_batch_size: 5
per_device_train_batch_size: 16
warmup_ratio: 0.1
"""
    inputs = _read(tmp_path / "recipe.yaml", text, "trl-0.16", 8000, num_processes=7)
    plan = make_plan(inputs)
    assert inputs.per_device_eval_batch_size is None
    # 16·7 completions a rollout; 8000·16 of them make 1143 batches a process, 285 updates of 4, a tenth to warm up.
    assert (plan.generation_batch_size, plan.max_steps, plan.warmup_steps) == (112, 285, 29)


def test_a_swift_launch_script(tmp_path: Path) -> None:
    text = r"""
# 8000 rows, 1 % held out
CUDA_VISIBLE_DEVICES=0,1,2,3,4,5 \
NPROC_PER_NODE=6 \
swift rlhf \
    --rlhf_type grpo \
    --dataset 'AI-MO/NuminaMath-TIR#8000' \
    --split_dataset_ratio 0.01 \
    --per_device_train_batch_size 8 \
    --per_device_eval_batch_size=8 \
    --gradient_accumulation_steps 2 \
    --num_generations 8 \
    --num_iterations 2 \
    --num_train_epochs 1 \
    --reward_funcs accuracy format
"""
    inputs = _read(tmp_path / "args.sh", text, "swift-4.6")
    assert (inputs.num_prompts, inputs.num_eval_prompts, inputs.num_processes) == (7920, 80, 6)
    assert make_plan(inputs).max_steps == 1320


def test_each_swift_data_set_is_sampled_and_split_by_itself() -> None:
    def prompts(datasets: list[str], rows: list[int | None], ratio: float) -> tuple[int, int | None]:
        arguments = {"dataset": datasets, "split_dataset_ratio": ratio, "per_device_eval_batch_size": 8}
        inputs = recipe_inputs(Recipe("swift-4.6", arguments), rows, {})
        return inputs.num_prompts, inputs.num_eval_prompts

    assert prompts(["a.jsonl#10", "b.jsonl"], [1000, 1000], 0.0) == (1010, None)
    assert prompts(["a.jsonl", "b.jsonl"], [1000, 1000], 0.0015) == (1998, 2)
    assert prompts(["hub/a#100", "hub/b#50"], [None, None], 0.1) == (135, 15)


@pytest.mark.parametrize(
    "launch",
    [
        "torchrun --nproc-per-node 2 --nnodes 2 swift/cli/rlhf.py --rlhf_type grpo --num_generations 4 2>&1 | tee log",
        "export NPROC_PER_NODE=4; swift rlhf --rlhf_type grpo --num_generations 4 && echo done",
        "# 8? no\nNPROC_PER_NODE=4 swift rlhf --rlhf_type grpo --num_generations 4\nswift export --num_generations 9",
    ],
)
def test_launch_scripts_as_people_write_them(tmp_path: Path, launch: str) -> None:
    inputs = _read(tmp_path / "run.sh", launch, "swift-4.6", 100)
    assert (inputs.num_generations, inputs.num_processes) == (4, 4)
    assert _read(tmp_path / "run.sh", launch, "swift-4.6", 100, num_processes=3).num_processes == 3


def test_an_unquoted_number_of_rows_is_no_comment(tmp_path: Path) -> None:
    assert (
        _read(tmp_path / "run.sh", "swift rlhf --rlhf_type grpo --dataset hub/name#500", "swift-4.6").num_prompts == 500
    )


def test_swift_dynamic_sampling_states_the_most_it_can_cost(tmp_path: Path) -> None:
    text = "swift rlhf --rlhf_type grpo --dynamic_sample true --max_resample_times 2 --num_generations 4"
    text += " --per_device_train_batch_size 4"
    plan = make_plan(_read(tmp_path / "run.sh", text, "swift-4.6", 100))
    assert plan.max_completions == 3 * plan.completions


def test_swift_saved_arguments(tmp_path: Path) -> None:
    values = {"global_world_size": 6, "dataset": ["data.jsonl"], "split_dataset_ratio": 0.0, "eval_strategy": "no"}
    values |= {"per_device_train_batch_size": 8, "num_generations": 8, "generation_batch_size": None, "max_steps": -1}
    values |= {"gradient_accumulation_steps": 2, "num_iterations": 2, "num_train_epochs": 1.0, "warmup_ratio": None}
    inputs = _read(tmp_path / "args.json", json.dumps(values), "swift-4.6", 8000)
    assert (make_plan(inputs).max_steps, make_plan(inputs).dropped_prompts_per_epoch) == (1332, 8)


def test_values_given_by_hand_come_before_the_recipe(tmp_path: Path) -> None:
    inputs = _read(tmp_path / "r.yaml", "num_generations: 16\n", "trl-1.16", 100, num_generations=4, num_processes=2)
    assert (inputs.num_generations, inputs.num_processes) == (4, 2)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("gone.yaml", None, "No such file"),
        ("r.yaml", "a: [", "a recipe is YAML, JSON"),
        ("r.yaml", b"\xff\xfe", "cannot be read"),
        ("r.yaml", "just text", "holds str, not arguments"),
        ("r.yaml", "num_generations: many", "num_generations = 'many' is not a number"),
        ("r.yaml", "num_generations: 2.5", "not a whole number"),
        ("r.json", "{", "a recipe is YAML, JSON"),
        ("r.sh", "trl grpo --dataset 'x", "cannot be read"),
        ("r.sh", "echo nothing", "none of its commands starts a program"),
        ("r.sh", "torchrun --nproc_per_node=$N my_grpo.py --max_steps 4", r"NPROC_PER_NODE = '\$N' is not a number"),
        ("r.yaml", "ENV: many\n3: 4\nnum_generations: few", "num_generations = 'few' is not a number"),
        ("r.json", '{"global_world_size": "many"}', "global_world_size = 'many' is not a number"),
        ("r.yaml", "dataset_name: hub/name", "hub/name is not here; give it by --num-prompts"),
        ("r.json", '{"name": "site", "version": "1.0.0"}', "is no recipe of TRL.* it has name, version"),
        ("r.yaml", "{}", "is no recipe of TRL.* it has no key at all"),
        ("r.yaml", "actor_rollout_ref: {}", "but of verl, whose files are not read"),
        ("r.yaml", "num_generationz: 4", "is no recipe.*for 'num_generationz' write 'num_generations'"),
        ("r.yaml", "max_steps: 4\nnum_generationz: 4", "almost.*for 'num_generationz' write 'num_generations'"),
        ("r.sh", "trl grpo --max_step 4", "almost.*for 'max_step' write 'max_steps'"),
        ("r.ipynb", '{"cells": [], "metadata": {}}', "the code of a notebook is not read; give its settings as opt"),
        ("r.py", "GRPOConfig()", "the code of a Python file is not read; give its settings as options"),
    ],
)
def test_a_recipe_that_says_too_little_or_nothing_is_refused(
    tmp_path: Path, name: str, text: str | bytes | None, message: str
) -> None:
    if text is not None:
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(RecipeError, match=message):
        recipe_inputs(read_recipe(tmp_path / name, "trl-1.16"), [None if "hub/name" in message else 100], {})


@pytest.mark.parametrize("key", [*sorted(OPTIONS), "warmup_ratio", *PROCESSES])
def test_what_is_no_number_is_refused_with_the_option_that_replaces_it(key: str) -> None:
    values = {"eval_strategy": "steps", "generation_batch_size": 8, key: "$N"}
    recipe = Recipe("trl-1.16", values, {key: "$N"} if key in PROCESSES else {})
    with pytest.raises(RecipeError, match=re.escape(f"{key} = '$N' is not a number; give --")) as error:
        recipe_inputs(recipe, [100], {})
    option = str(error.value).rpartition("--")[2].replace("-", "_")
    assert option in inspect.signature(plan).parameters
    assert recipe_inputs(recipe, [100], {option: 8})


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("python3 -m verl.trainer.main_ppo data.train_batch_size=8", "main_ppo is verl's, whose scripts are not"),
        ("A=(-m swift.cli.rlhf)\nif x; then A+=(--y); fi\ntorchrun ${A[@]}", r"what is started stands in \$A, whose"),
        ('A=(swift rlhf)\n[[ $X ]] && A+=(--num_generations 4)\n"${A[@]}"', r"what is started stands in \$A, whose"),
    ],
)
def test_a_script_whose_training_cannot_be_read_is_refused_with_the_reason(
    tmp_path: Path, script: str, reason: str
) -> None:
    (tmp_path / "r.sh").write_text(script)
    with pytest.raises(RecipeError, match=reason):
        read_recipe(tmp_path / "r.sh", "swift-4.6")


def test_what_a_script_writes_in_an_array_with_defaults_of_defaults_is_planned(tmp_path: Path) -> None:
    script = 'DATA=${DATA:-"${HOME}/data"}\nargs=(--nproc_per_node $((2 * 2)) swift/cli/rlhf.py --rlhf_type grpo)\n'
    script += 'args+=(--num_generations "${G:-${H:-4}}")\ntorchrun "${args[@]}"\n'
    inputs = _read(tmp_path / "run.sh", script, "swift-4.6", 100)
    assert (inputs.num_generations, inputs.num_processes) == (4, 4)


BOMB = "a: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 30))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.yaml", BOMB, "its aliases make it longer than 1,000,000 characters"),
        ("a.yaml", "a: &a [*a]", "its aliases make it longer"),
        ("a.yaml", f"num_generations: {'9' * 5000}", "a recipe is YAML"),
        ("a.json", f'{{"num_generations": {"9" * 5000}}}', "a recipe is YAML"),
        ("a.yaml", "a: !!bool perhaps", "a recipe is YAML"),
    ],
)
def test_a_file_that_would_fill_the_memory_or_breaks_its_reader_is_refused(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(RecipeError, match=message):
        read_recipe(tmp_path / name, "swift-4.6")
