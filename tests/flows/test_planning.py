"""`grpo plan`, run as a person does: figures, errors with fixes, other systems' recipes, forecasts."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import tomli_w

from grpo_core.planning import nvidia
from tests.command_line import run_here
from tests.conftest import config_values, make_model
from tests.nvidia_smi import LOST, put_nvidia_smi
from tests.qwen import QWEN
from tests.serving import free_ports
from tests.tasks.data.test_lengths import trained_run

ROOT = Path(__file__).parents[2]
FIGURES = [
    "num_prompts",
    "num_generations",
    "per_device_train_batch_size",
    "num_processes",
    "gradient_accumulation_steps",
    "steps_per_generation",
    "generation_batch_size",
    "effective_batch_size",
    "prompts_per_generation",
    "expanded_dataset_size",
    "dropped_prompts_per_epoch",
    "micro_steps_per_epoch",
    "updates_per_epoch",
    "max_steps",
    "rollouts",
    "completions",
    "max_completion_tokens",
    "warmup_steps",
]
TRL_CASE = {
    "--num-prompts": 8000,
    "--num-generations": 6,
    "--num-processes": 3,
    "--per-device-train-batch-size": 4,
    "--gradient-accumulation-steps": 2,
    "--num-train-epochs": 2,
}


def _grpo(*arguments: Any, **environment: str) -> subprocess.CompletedProcess[str]:
    return run_here("plan", *map(str, arguments), **environment)


def _json(*arguments: Any, status: int = 0, **environment: str) -> dict[str, Any]:
    done = _grpo(*arguments, "--json", **environment)
    assert done.returncode == status, done.stdout + done.stderr
    return json.loads(done.stdout)


def _flat(options: dict[str, Any]) -> list[Any]:
    return [part for pair in options.items() for part in pair]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration whose 21 prompts leave one over, with known pass rates."""
    folder = tmp_path_factory.mktemp("plan")
    for name in ("train", "eval"):
        frame = pl.DataFrame({"prompt": [str(n) for n in range(21)], "pass_rate": [0.5] * 21})
        frame.write_parquet(folder / f"{name}.parquet")
    values = config_values(make_model(folder / "model"), folder)
    del values["train"]["max_steps"]
    path = folder / "run.toml"
    path.write_text(tomli_w.dumps(values))
    return path


def test_a_configuration_s_plan_as_json(config: Path, tmp_path: Path) -> None:
    answer = _json(config, GRPO_STORAGE=str(tmp_path))
    assert (answer["valid"], answer["errors"], answer["fixes"], answer["rules"]) == (True, [], [], "grpo")
    assert [name for name in FIGURES if name not in answer] == []
    assert (answer["num_prompts"], answer["prompts_per_generation"], answer["dropped_prompts_per_epoch"]) == (21, 4, 1)
    assert answer["max_steps"] == 5
    assert "1 of 21 prompts are left out of each epoch" in answer["notes"][0]
    assert answer["forecasts"]["useful_groups"]["share"] == pytest.approx(1 - 2 * 0.5**4)


def test_forecasts_are_for_this_machine_or_for_the_gpu_that_is_named(config: Path, tmp_path: Path) -> None:
    put_nvidia_smi(tmp_path, [{"name": "NVIDIA L4", "memory.total": "[N/A]", "compute_cap": "8.9"}])
    here = _json(config, GRPO_STORAGE=str(tmp_path), PATH=str(tmp_path), CUDA_VISIBLE_DEVICES="")["forecasts"]
    assert "memory" not in here
    assert "no earlier run of this model on this hardware (CPU with" in here["time"]["error"]
    assert "GRPO_MEASURE=0" in here["time"]["error"]
    assert "--history looks for one in MLflow, --gpu H200" in here["time"]["error"]
    on_l4 = _json(config, GRPO_STORAGE=str(tmp_path), PATH=str(tmp_path))["forecasts"]
    assert "estimate for one NVIDIA L4" in on_l4["memory"]["how"]
    assert "(NVIDIA L4)" in on_l4["time"]["error"]
    bf16 = ("--set", "train.mixed_precision=bf16")
    probe = ("--set", "data.curriculum.probe=4")
    there = _json(config, "--gpu", "h200", *bf16, *probe, GRPO_STORAGE=str(tmp_path), PATH=str(tmp_path))["forecasts"]
    assert "TFLOP/s of one h200" in there["time"]["how"]
    parts = there["time"]["parts_hours"]  # all of the probe together, in 6 token steps of 4 to 10 ms
    assert parts["probe"] == pytest.approx(6 * (0.004 * 0.01) ** 0.5 / 3600)
    assert there["time"]["gpu_hours"] == pytest.approx(parts["probe"] + parts["updates"])
    assert there["memory"]["gpu_memory_gib"] == pytest.approx(140.4, abs=0.1)


@pytest.mark.slow
def test_a_driver_that_does_not_answer_is_no_plan_for_a_cpu_and_one_that_lost_a_gpu_is_noted(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvidia, "DEVICES", tmp_path)
    (tmp_path / "nvidia0").touch()
    refused = _grpo(config, GRPO_STORAGE=str(tmp_path), PATH=str(tmp_path))
    assert refused.returncode == 2
    assert "this machine has an NVIDIA GPU, but no nvidia-smi on PATH" in refused.stderr
    put_nvidia_smi(tmp_path, 7, first=LOST, status=15)
    lost = _json(config, GRPO_STORAGE=str(tmp_path), PATH=str(tmp_path))
    assert f"nvidia-smi lists 7 GPUs, and then fails: status 15, {LOST.strip()}" in lost["notes"]


def test_the_tokens_of_a_pass_are_chosen_for_a_gpu_and_shown(config: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN["1.5B"]))
    keys = {"model.name_or_path": tmp_path, "train.mixed_precision": "bf16", "rollout.max_completion_length": 512}
    keys |= {"train.per_device_train_batch_size": 256, "train.gradient_accumulation_steps": 1}
    changes = [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]
    options = (config, "--num-prompts", 1000, "--prompt-tokens", 256, *changes)
    found = {gpu: _json(*options, "--gpu", gpu, GRPO_STORAGE=str(tmp_path)) for gpu in ("H200", "H100", "")}
    tokens = {gpu: answer["max_tokens_per_pass"] for gpu, answer in found.items()}
    assert tokens["H200"] > tokens["H100"] > 10_000 and tokens[""] is None
    memory = found["H100"]["forecasts"]["memory"]
    assert memory["tokens_per_pass"] == tokens["H100"] and "warning" not in memory
    # 256 completions of 512 tokens, and 64 prompts of 256.
    assert memory["passes_per_update"] == -(-(256 * 512 + 64 * 256) // tokens["H100"])
    shown = " ".join(_grpo(*options, "--gpu", "H100", COLUMNS="200", GRPO_STORAGE=str(tmp_path)).stdout.split())
    assert f"tokens in a pass │ {tokens['H100']:,} │ at most; an update with completions of 512 tokens takes" in shown
    refused = _json(*options, "--set", "train.max_tokens_per_pass=700", status=2)
    assert "train.max_tokens_per_pass = 700: a sequence may have 768 tokens" in refused["errors"][0]


@pytest.mark.parametrize(("name", "size"), [("gsm8k", "0.5B"), ("gsm8k-2-gpus", "1.5B")])
def test_the_configurations_for_gpus_are_planned_to_fit_one_without_a_network(
    name: str, size: str, tmp_path: Path
) -> None:
    path = ROOT / "configs" / f"{name}.toml"
    assert f"Qwen2.5-{size}-" in tomllib.loads(path.read_text())["model"]["name_or_path"]
    (tmp_path / "config.json").write_text(json.dumps(QWEN[size]))
    options = ["--gpu", "H100", "--num-prompts", 7473, "--prompt-tokens", 150]
    answer = _json(path, *options, "--set", f"model.name_or_path={tmp_path}", GRPO_STORAGE=str(tmp_path))
    assert (answer["max_steps"], answer["effective_batch_size"]) == (100, 256)
    memory = answer["forecasts"]["memory"]
    assert memory["peak_memory_gib"] < 80 and "warning" not in memory


def test_how_far_to_sample_ahead_is_simulated_from_the_last_training_of_a_run(config: Path, tmp_path: Path) -> None:
    if find_spec("vllm") is None:
        pytest.skip("needs vllm, which is not installed")
    name = tomllib.loads(config.read_text())["name"]
    keys = ["--set", "rollout.engine=vllm-server"]
    without = _json(config, *keys, GRPO_STORAGE=str(tmp_path))["forecasts"]
    assert f"the run {name} has not been trained" in without["sampling_ahead"]["error"]
    trained_run(tmp_path / "runs" / name, [1, 2, 3, 4])
    found = _json(config, *keys, GRPO_STORAGE=str(tmp_path))["forecasts"]
    assert found["sampling_ahead"]["how"].startswith("simulated, not run, with 1 server: from the completions")
    assert [*found["sampling_ahead"]["updates_per_hour"]] == ["0", "1", "2", "4", "8"]
    others = (_json(config, *keys, "--gpu", "H200"), _json(config))
    assert not any("sampling_ahead" in other["forecasts"] for other in others)


@pytest.mark.parametrize(
    ("options", "named", "said"),
    [
        *(
            (["--gpu", gpu, "--set", "train.mixed_precision=no", "--set", "rollout.engine=vllm"], named, said)
            for said in ["train.mixed_precision is 'no', with vLLM on a GPU"]
            for gpu, named in (("H200", 1), ("", 0))
        ),
        *(
            (["--gpu", gpu], named, "the memory of foo is not known (known by name: B200, H200")
            for gpu, named in (("foo", 1), ("H200", 0), ("", 0))
        ),
        *(
            (["--set", "data.curriculum.kind=variance", "--set", f"data.curriculum.probe={probe}"], named, said)
            for said in ["data.curriculum.kind is 'variance', with data.curriculum.probe = 0"]
            for probe, named in ((0, 1), (4, 0))
        ),
    ],
)
def test_what_has_no_or_another_effect_is_named_where_it_has(
    config: Path, options: list[str], named: int, said: str
) -> None:
    assert sum(said in note for note in _json(config, *options)["notes"]) == named


@pytest.mark.slow
def test_what_would_fit_is_shown_whole_on_a_narrow_screen(config: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN["7B"]))
    keys = {"model.name_or_path": tmp_path, "rollout.engine": "vllm", "train.mixed_precision": "bf16"}
    changes = [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]
    options = ("--gpu", "H100", "--num-prompts", 100, *changes)
    shown = _grpo(config, *options, COLUMNS="80", GRPO_STORAGE=str(tmp_path)).stdout
    assert "would fit" in shown and "…" not in shown
    remedies = _json(config, *options, GRPO_STORAGE=str(tmp_path))["forecasts"]["memory"]["remedies"]
    assert shown.count("would fit") == len(remedies) > 0
    assert all(remedy["changes"] and remedy["peak_memory_gib"] < 79.6 for remedy in remedies)


def test_data_that_is_elsewhere_is_planned_by_its_number_of_prompts(config: Path, tmp_path: Path) -> None:
    answer = _json(config, "--set", "data.train=gone.parquet", "--num-prompts", 40, GRPO_STORAGE=str(tmp_path))
    assert (answer["num_prompts"], set(answer["forecasts"])) == (40, {"time"})


def test_the_options_can_be_read_on_a_narrow_screen() -> None:
    done = _grpo("--help", COLUMNS="80")
    assert "--gradient-accumulation-steps" in done.stdout


@pytest.mark.slow
def test_a_history_that_cannot_be_asked_is_said(config: Path) -> None:
    [nobody] = free_ports(1)
    answer = _json(config, "--history", status=2, MLFLOW_TRACKING_URI=f"http://127.0.0.1:{nobody}")
    assert f"MLflow at http://127.0.0.1:{nobody} does not answer" in answer["errors"][0]


def test_values_given_by_hand_replace_the_configuration_s(config: Path, tmp_path: Path) -> None:
    answer = _json(config, "--num-prompts", 100, "--max-steps", 3, "--set", "rollout.num_generations=8")
    assert (answer["num_prompts"], answer["max_steps"], answer["num_generations"]) == (100, 3, 8)


def test_no_configuration_is_needed() -> None:
    answer = _json(*_flat(TRL_CASE))
    assert (answer["max_steps"], answer["expanded_dataset_size"], answer["generation_batch_size"]) == (4000, 48_000, 24)
    assert answer["forecasts"] == {}


def test_an_invalid_run_says_why_and_what_works() -> None:
    options = {**TRL_CASE, "--num-processes": 7, "--per-device-train-batch-size": 1, "--num-generations": 8}
    options["--gradient-accumulation-steps"] = 1
    answer = _json(*_flat(options), status=2)
    assert not answer["valid"]
    assert "not divisible by num_generations=8" in answer["errors"][0]
    assert answer["fixes"][0]["changes"] == {"num_generations": 7}
    for fix in answer["fixes"]:
        changed = {f"--{key.replace('_', '-')}": value for key, value in fix["changes"].items()}
        assert _json(*_flat({**options, **changed}))["generation_batch_size"] == fix["generation_batch_size"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ([], "the number of prompts is not known"),
        (["gone.toml"], "gone.toml: no such file"),
        (["--num-prompts", 10, "--num-generations", 1], "num_generations=1 leaves nothing to compare"),
        (["--recipe", "trl", "gone.yaml"], "No such file"),
        (["--num-prompts", 3, "--per-device-train-batch-size", 64], "3 prompts do not fill one generation batch of 8"),
        (["--num-prompts", 0], "num_prompts=0 is not positive"),
        (["--num-prompts", 80, "--max-steps", 5, "--warmup-steps", 9], "longer than the run's 5 updates"),
        (["--num-prompts", 9, "--rules", "trl-1.16", "--num-processes", -1], "num_processes=-1 is not positive"),
        (["--recipe", "trl", "--rules", "grpo", "--num-prompts", 9], "--rules grpo does not go with --recipe trl"),
        (["--num-prompts", 9, "--per-device-eval-batch-size", 3], "per_device_eval_batch_size: this project evaluates"),
        (
            ["recipe.yaml"],
            "recipe.yaml: a configuration of this project is TOML; if this is another system's recipe, add",
        ),
        (["run.sh", "--num-prompts", 9], "add --recipe trl (TRL, Open-R1) or --recipe swift (ms-swift)"),
        (["n.ipynb"], "n.ipynb: the code of a notebook is not read; give its settings as options instead of the file"),
        ([Path(__file__).parent], "cannot be read: Is a directory"),
    ],
)
def test_what_cannot_be_planned_is_one_json_object_too(arguments: list[Any], error: str) -> None:
    answer = _json(*arguments, status=2)
    assert error in "\n".join(answer["errors"])


def test_a_recipe_is_planned_by_its_system_s_rules_over_its_data(tmp_path: Path) -> None:
    pl.DataFrame({"prompt": ["x"] * 8000}).write_parquet(tmp_path / "data.parquet")
    script = tmp_path / "args.sh"
    script.write_text(
        f"NPROC_PER_NODE=6 swift rlhf --rlhf_type grpo --dataset {tmp_path / 'data.parquet'} --num_generations 8 "
        "--split_dataset_ratio 0.01 --per_device_train_batch_size 8 --per_device_eval_batch_size 8 "
        "--gradient_accumulation_steps 2 --num_iterations 2 --num_train_epochs 1\n"
    )
    answer = _json("--recipe", "swift", script)
    assert (answer["rules"], answer["num_prompts"], answer["max_steps"]) == ("swift-4.6", 7920, 1320)
    assert _json("--recipe", "swift", script, "--num-train-epochs", 3)["max_steps"] == 3960


@pytest.mark.parametrize(("rules", "status"), [("trl-1.16", 0), ("trl-0.17", 0), ("trl-0.16", 2)])
def test_the_same_recipe_under_the_rules_of_another_version(tmp_path: Path, rules: str, status: int) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("num_generations: 8\nper_device_train_batch_size: 1\ngradient_accumulation_steps: 8\n")
    arguments = ["--recipe", "trl", recipe, "--rules", rules, "--num-processes", 7, "--num-prompts", 8000]
    assert _json(*arguments, status=status)["rules"] == rules


def test_a_refusal_says_that_one_process_was_assumed_where_the_recipe_gives_no_number(tmp_path: Path) -> None:
    """As Open-R1's recipe of a 1.5B model, which its page starts with 7 processes."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("num_generations: 14\nper_device_train_batch_size: 16\ngradient_accumulation_steps: 1\n")
    arguments = ["--recipe", "trl", recipe, "--num-prompts", 8000]
    assert "1 is assumed; give --num-processes" in _json(*arguments, status=2)["errors"][-1]
    assert _json(*arguments, "--num-processes", 7)["generation_batch_size"] == 112
    assert "is assumed" not in str(_json(*arguments, "--num-processes", 1, status=2))


def test_a_megatron_recipe_is_planned_by_its_own_arithmetic(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        "swift rollout --model m &\nNPROC_PER_NODE=4 megatron rlhf --rlhf_type grpo --dataset hub/name#1000 "
        "--tensor_model_parallel_size 2 --global_batch_size 32 --num_generations 8 --num_train_epochs 1\n"
    )
    answer = _json("--recipe", "swift", script)
    assert (answer["rules"], answer["num_processes"], answer["max_steps"]) == ("swift-4.6 (Megatron)", 2, 250)
    assert any("2 replicas of the model that 4 processes hold" in note for note in answer["notes"])
    assert _json("--recipe", "swift", script, "--num-prompts", 100)["max_steps"] == 25
    refused = _json("--recipe", "swift", script, "--num-generations", 5, status=2)
    assert "not divisible by num_generations=5" in refused["errors"][0]
    assert {"num_generations": 4} in [fix["changes"] for fix in refused["fixes"]]


def test_a_schedule_that_another_system_never_finishes_is_noted() -> None:
    options = {"--num-prompts": 15, "--num-processes": 3, "--per-device-train-batch-size": 4, "--num-generations": 6}
    options |= {"--gradient-accumulation-steps": 2, "--num-train-epochs": 2.3, "--rules": "trl-0.17"}
    assert any("plans 10 updates but ends after 9" in note for note in _json(*_flat(options))["notes"])


def test_the_table_shows_what_the_json_says(config: Path, tmp_path: Path) -> None:
    done = _grpo(config, "--gpu", "H200", COLUMNS="200", GRPO_STORAGE=str(tmp_path))
    assert done.returncode == 0
    for name in (*FIGURES, "1 of 21 prompts are left out", "peak memory per GPU", "1 − E[p^G + (1−p)^G]"):
        assert name in done.stdout
    refused = _grpo(*_flat({**TRL_CASE, "--num-generations": 7}), COLUMNS="200")
    assert (refused.returncode, "num_generations = 8" in refused.stdout) == (2, True)
    assert "not divisible by num_generations=7" in refused.stderr


@pytest.mark.slow
def test_planning_needs_neither_torch_nor_prefect_nor_mlflow(config: Path) -> None:
    code = (
        "import sys; from flows.cli.main import app\n"
        f"try: app(['plan', {str(config)!r}, '--json'])\n"
        "except SystemExit as end: assert end.code == 0, end.code\n"
        "loaded = {'torch', 'prefect', 'mlflow', 'transformers', 'pandera', 'pandas'} & set(sys.modules)\n"
        "assert not loaded, loaded"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_ctrl_c_ends_a_plan_that_waits_after_it_has_read_data(config: Path) -> None:
    code = (
        "import os, signal, threading\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background ignores it
        "from flows.parameters.describe_plan import describe_plan\n"
        "from grpo_core.config.files import load_config\n"
        "def measure(*arguments):\n"
        "    for seconds in (0.2, 5):\n"  # as a person does: the first is not seen if it comes just before the wait
        "        press = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))\n"
        "        press.daemon = True\n"
        "        press.start()\n"
        "    signal.alarm(20)\n"  # where Ctrl-C is lost, this ends the test
        "    os.read(os.pipe()[0], 1)\n"
        f"try: describe_plan(load_config({str(config)!r}), measure=measure)\n"
        "except KeyboardInterrupt: print('interrupted')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "interrupted\n", (done.returncode, done.stderr)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--set", "train.max_steps=3"], "--set overrides keys of a configuration, but no file is given: name one"),
        (["--rules", "trl-0.17", "--gpu", "H200", "--history"], "--gpu, --history: for this project's configurations"),
    ],
)
def test_an_option_that_changes_nothing_is_refused(options: list[str], sentence: str) -> None:
    done = _grpo("--num-prompts", 64, "--num-generations", 8, *options)
    assert done.returncode == 2
    assert sentence in " ".join((done.stdout + done.stderr).split())
