"""Which command of a script trains, with what arguments and processes; what trains otherwise is refused saying so."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from grpo_core.planning import frameworks
from grpo_core.planning.frameworks.launches import RecipeError
from grpo_core.planning.frameworks.recipes import Recipe, megatron_inputs, read_recipe, recipe_inputs
from grpo_core.planning.plan import PlanError, make_plan
from grpo_core.planning.rules import PlanInputs, Rules


def _recipe(folder: Path, text: str, rules: Rules = "swift-4.6", name: str = "run.sh") -> Recipe:
    (folder / name).write_text(text)
    return read_recipe(folder / name, rules)


def _inputs(folder: Path, text: str, rules: Rules = "swift-4.6", name: str = "run.sh", **given: Any) -> PlanInputs:
    recipe = _recipe(folder, text, rules, name)
    return recipe_inputs(recipe, [None] * max(len(recipe.datasets), 1), {"num_prompts": 8000, **given})


@pytest.mark.parametrize("server", ["swift rollout --model m", "vllm serve m --port 1", "swift deploy --model m"])
def test_the_server_that_a_script_starts_first_is_not_the_training(tmp_path: Path, server: str) -> None:
    text = f"""
CUDA_VISIBLE_DEVICES=0 \\
{server} > server.log 2>&1 &
until curl -s localhost > /dev/null; do sleep 1; done
CUDA_VISIBLE_DEVICES=1,2,3,4 NPROC_PER_NODE=4 \\
swift rlhf --rlhf_type grpo --num_generations 4 --per_device_train_batch_size 2
"""
    inputs = _inputs(tmp_path, text)
    assert (inputs.num_generations, inputs.per_device_train_batch_size, inputs.num_processes) == (4, 2, 4)


def test_a_text_over_several_lines_is_one_argument(tmp_path: Path) -> None:
    text = """PROMPT="Think, it's hard.
Then # answer"
swift rlhf --rlhf_type grpo --system "$PROMPT" --num_generations 4
"""
    assert _recipe(tmp_path, text).arguments["system"] == "Think, it's hard.\nThen # answer"


@pytest.mark.parametrize(
    ("rules", "text", "reason"),
    [
        ("swift-4.6", "swift rollout --model m", "swift rollout is a server"),
        ("swift-4.6", "swift sft --model m --max_steps 3", "swift sft does not train by GRPO"),
        ("swift-4.6", "swift rlhf --rlhf_type dpo --model m", "trains by dpo, not by GRPO"),
        ("swift-4.6", "swift rlhf --num_generations 8", "trains by dpo, its default, not by GRPO"),
        ("swift-4.6", "megatron sft --model m", "megatron sft does not train by GRPO"),
        ("swift-4.6", "trl grpo --model_name_or_path m", "give --recipe trl"),
        ("swift-4.6", "swift rlhf --rlhf_type grpo \\\n  ...", r"not written out \(it says '...'"),
        ("trl-1.16", "trl vllm-serve --model m", "trl vllm-serve is a server"),
        ("trl-1.16", "trl sft --model_name_or_path m", "trl sft does not train by GRPO"),
        ("trl-1.16", "trl dpo --model_name_or_path m", "trl dpo does not train by GRPO"),
        ("trl-1.16", "swift rlhf --rlhf_type grpo", "give --recipe swift"),
        ("trl-1.16", "accelerate launch sft.py --max_steps 9", "nothing says that it trains by GRPO"),
        ("trl-1.16", "accelerate launch my_grpo.py --env games", "given no setting that a plan follows from"),
        ("trl-1.16", "python own.py --num_generations 8", "own.py does not take TRL's arguments"),
        ("trl-1.16", "python other.py --num_generations 8", "other.py does not train by GRPO"),
    ],
)
def test_what_is_no_training_by_grpo_is_refused_saying_so(tmp_path: Path, rules: Rules, text: str, reason: str) -> None:
    (tmp_path / "own.py").write_text("from trl import GRPOConfig\nargs = GRPOConfig(num_generations=4)\n")
    (tmp_path / "other.py").write_text("from trl import SFTConfig, TrlParser\n")
    with pytest.raises(RecipeError, match=f"no training by GRPO that can be planned: .*{reason}"):
        _recipe(tmp_path, text, rules)


def test_the_page_says_what_of_a_script_is_read_and_what_never_is(tmp_path: Path) -> None:
    """Each line of its table is tried: it plans the updates that it says, or is refused by a sentence that says so."""
    page = (Path(frameworks.__file__).parent / "README.md").read_text()
    rows = re.findall(r"^\| (.+) \| `(.+)` \| (.+) \|$", page, re.MULTILINE)
    assert len(rows) > 20
    for construct, example, outcome in rows:
        script = example.replace("⏎", "\n").replace("train ", "trl grpo --num_generations 4 --max_steps ")
        try:
            found = str(_inputs(tmp_path, script, "trl-1.16").max_steps)
        except RecipeError as error:
            found = str(error)
        assert outcome == found or (not outcome.isdecimal() and outcome in found), construct


def test_a_file_for_another_kind_of_training_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="rlhf_type is gkd: this does not train by GRPO"):
        _recipe(tmp_path, "rlhf_type: gkd\n", name="r.yaml")


def test_trl_s_rloo_has_its_own_default(tmp_path: Path) -> None:
    # trl/trainer/rloo_config.py:297: num_generations 2, where grpo_config.py says 8; the rest is the same
    assert _inputs(tmp_path, "trl rloo --dataset_name x", "trl-1.16").num_generations == 2
    assert _inputs(tmp_path, "trl grpo --dataset_name x", "trl-1.16").num_generations == 8
    assert _inputs(tmp_path, "trl rloo --dataset_name x --num_generations 4", "trl-1.16").num_generations == 4


def test_processes_stand_in_trl_s_own_file(tmp_path: Path) -> None:
    # 4 processes, b = 8, G = 8: 32 completions, 4 prompts; 8000/4 = 2000 updates an epoch, 3 epochs
    inputs = _inputs(tmp_path, "dataset_name: x\nnum_processes: 4\n", "trl-1.16", "r.yaml")
    assert (inputs.num_processes, make_plan(inputs).max_steps) == (4, 6000)
    # trl/accelerate_configs: zero2.yaml has 8; single_gpu.yaml too, but with distributed_type NO accelerate starts one
    for name, processes in {"zero2": 8, "single_gpu": 1}.items():
        text = f"dataset_name: x\naccelerate_config: {name}\n"
        assert _recipe(tmp_path, text, "trl-1.16", "r.yaml").processes == {"num_processes": processes}


@pytest.mark.parametrize(("options", "processes"), [("", 6), (" --num_processes 3", 3)])
def test_processes_stand_in_accelerate_s_file(tmp_path: Path, options: str, processes: int) -> None:
    (tmp_path / "ddp.yaml").write_text("distributed_type: MULTI_GPU\nnum_processes: 6\n")
    text = f"accelerate launch --config_file ddp.yaml{options} my_grpo.py --num_generations 6"
    assert _inputs(tmp_path, text, "trl-1.16").num_processes == processes


def test_a_configuration_that_a_script_names_is_read_beside_it_or_in_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "beside.yaml").write_text("num_generations: 4\nper_device_train_batch_size: 2\nnum_processes: 2\n")
    elsewhere = tmp_path / "work"
    elsewhere.mkdir()
    (elsewhere / "there.yaml").write_text("num_generations: 16\n")
    monkeypatch.chdir(elsewhere)
    here = 'HERE=$(dirname "$0")\ntrl grpo --config $HERE/beside.yaml --per_device_train_batch_size 6'
    inputs = _inputs(tmp_path, here, "trl-1.16")
    assert (inputs.num_generations, inputs.per_device_train_batch_size, inputs.num_processes) == (4, 6, 2)
    assert _inputs(tmp_path, "trl grpo --config there.yaml", "trl-1.16").num_generations == 16
    with pytest.raises(RecipeError, match=r"--config gone.yaml: there is no such file, neither beside .*run\.sh"):
        _recipe(tmp_path, "trl grpo --config gone.yaml", "trl-1.16")


def test_swift_s_file_of_arguments_comes_first_on_its_command(tmp_path: Path) -> None:
    (tmp_path / "args.yaml").write_text("rlhf_type: grpo\nnum_generations: 4\nper_device_train_batch_size: 4\n")
    inputs = _inputs(tmp_path, "NPROC_PER_NODE=2 swift rlhf args.yaml --num_generations 8")
    assert (inputs.num_generations, inputs.per_device_train_batch_size, inputs.num_processes) == (8, 4, 2)


def test_variables_and_arrays_of_the_script_are_known(tmp_path: Path) -> None:
    text = "G=4\nARGS=(--rlhf_type grpo\n  --num_generations $G)\nNPROC_PER_NODE=${GPUS:-2} swift rlhf ${ARGS[@]} $@"
    inputs = _inputs(tmp_path, text)
    assert (inputs.num_generations, inputs.num_processes) == (4, 2)


def test_a_teacher_makes_one_completion_enough(tmp_path: Path) -> None:
    # swift/arguments/rlhf_args.py:408: one is refused without a teacher. 4 processes · b = 2 · A = 2: 16 prompts
    text = "NPROC_PER_NODE=4 swift rlhf --rlhf_type grpo --num_generations 1 --per_device_train_batch_size 2 "
    text += "--gradient_accumulation_steps 2 --num_train_epochs 1"
    assert make_plan(_inputs(tmp_path, f"{text} --teacher_model m")).max_steps == 500
    with pytest.raises(PlanError, match="num_generations=1 leaves nothing to compare"):
        make_plan(_inputs(tmp_path, text))


def test_prompts_by_hand_come_before_the_rows_that_any_number_of_data_sets_say(tmp_path: Path) -> None:
    for datasets, said in {"a#500": 500, "a#500 b#300": 800}.items():
        recipe = _recipe(tmp_path, f"swift rlhf --rlhf_type grpo --dataset {datasets}")
        rows = [None] * len(recipe.datasets)
        assert recipe_inputs(recipe, rows, {}).num_prompts == said
        assert recipe_inputs(recipe, rows, {"num_prompts": 100}).num_prompts == 100


def test_ray_s_file_says_what_trains_under_train(tmp_path: Path) -> None:
    text = """
rlhf_type: grpo
dataset: d#2000
micro_batch_size: 2
global_batch_size: 16
num_generations: 8
num_train_epochs: 1
colocate_groups: [[train, rollout]]
train: {gpus: 4, tensor_model_parallel_size: 2}
rollout: {gpus: 4}
"""
    (tmp_path / "ray.yaml").write_text(text)
    for recipe in (
        _recipe(tmp_path, text, name="r.yaml"),
        _recipe(tmp_path, "megatron rlhf --use_ray true --config ray.yaml"),
    ):
        inputs = megatron_inputs(recipe, [None], {})
        assert (inputs.world_size, inputs.replicas, inputs.num_prompts, inputs.ray) == (4, 2, 2000, True)
    with pytest.raises(RecipeError, match=r"train\.gpus is not given"):
        _recipe(tmp_path, "rlhf_type: grpo\nglobal_batch_size: 8\ntrain: {tuner_type: lora}\n", name="r.yaml")
