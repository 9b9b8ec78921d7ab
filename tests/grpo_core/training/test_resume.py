"""Killed at any point and started again, a training ends where the undisturbed one does, bit for bit on a CPU."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import os
import pkgutil
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from benchmarks.command import python_path
from grpo_core.config.files import dump_config, load_config
from grpo_core.errors import EngineError, NotFiniteError
from grpo_core.planning.plan import load_plan, make_plan, plan_inputs
from grpo_core.rollout.transformers_engine import TransformersEngine
from grpo_core.training import held_out, update
from grpo_core.training import loop as trainer
from grpo_core.training.checkpoint import CheckpointError
from grpo_core.training.interrupt import Stopped
from grpo_core.training.loop import train
from grpo_core.training.state import random_state, set_random_state
from tests.conftest import config_values, make_model, make_run, with_keys, write_sums
from tests.grpo_core.training import killing
from tests.grpo_core.training.test_plain import add_teachers
from tests.grpo_core.training.training import (
    are_close,
    assert_same,
    demonstrate,
    figures_of,
    interrupted,
    result_of,
    trained_run,
)
from tests.sources import sources_run, two_sources

ROOT = Path(__file__).parents[3]

# A rollout feeds 4 micro-steps of 2 slices, an update takes 3: every update begins elsewhere in a window. 13 prompts
# make 6 rollouts of 2 and one dropped prompt an epoch, so that 10 updates end in the second.
ALL_AT_ONCE = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 3,
    "steps_per_generation": 2,
    "num_iterations": 2,
    "max_steps": 10,
    "save_steps": 2,
    "beta": 0.1,
    "sync_ref_model": True,
    "ref_model_sync_steps": 3,
    "dynamic_sample": True,
    "top_entropy_quantile": 0.8,
    "top_p": 0.9,
    "top_k": 8,
    "min_p": 0.01,
    "use_adaptive_entropy": True,
    "entropy_coef": 0.01,
    "entropy_target": 2.0,
    "eval_steps": 3,
    "load_best_model_at_end": True,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 3,
}
# Groups whose rewards are equal are not replaced, since the teacher teaches there.
TAUGHT = ALL_AT_ONCE | {"dynamic_sample": False}
WARM = {"per_device_train_batch_size": 4, "save_steps": 1}
ITSELF = {"template": "{answer}={prompt}{better}+", "update_rate": 0.3}
ITS_DIVERGENCE = ITSELF | {"divergence_beta": 0.4}
BY_SOURCE: dict[str, Any] = {}
DIVERGENCE = {"divergence_beta": 0.5, "divergence_top_k": 5}
DIVERGENCE_BY_SOURCE = {"divergence_beta": 0.3}
ADAPTER = {
    "use_peft": True,
    "lora_r": 4,
    "lora_dropout": 0.2,
    "beta": 0.1,
    "num_iterations": 2,
    "max_steps": 6,
    "save_steps": 2,
}


NEVER_SAVED = {"save_steps": 100, "max_steps": 6}


@pytest.fixture(scope="module")
def never_saved(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """No step of it is saved by `save_steps`, which is beyond the end."""
    folder = tmp_path_factory.mktemp("never-saved")
    return trained_run(folder / "run", config_values(model_folder, folder), **NEVER_SAVED)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["generate", "compute_logprobs"])
def test_an_engine_that_fails_ends_the_training_with_a_checkpoint_from_which_it_goes_on(
    values: dict[str, Any], never_saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """It fails as it samples, or as it gets weights."""
    run = make_run(tmp_path / "run", with_keys(values, **NEVER_SAVED))
    usual, calls = getattr(TransformersEngine, method), itertools.count(1)

    def failing(self: TransformersEngine, *arguments: Any) -> Any:
        if next(calls) == 4:
            raise EngineError("no server is left")
        return usual(self, *arguments)

    with monkeypatch.context() as patched, pytest.raises(EngineError, match="no server is left"):
        patched.setattr(TransformersEngine, method, failing)
        train(run, run / "training")
    assert [folder.name for folder in (run / "training" / "checkpoints").iterdir()] == [
        f"step-{len(figures_of(run)):06d}"
    ]
    train(run, run / "training")
    assert_same(run, never_saved)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keys", "kills", "teacher"),
    [
        pytest.param(TAUGHT, 3, BY_SOURCE, id="taught by source, all at once", marks=pytest.mark.e2e),
        pytest.param(TAUGHT, 3, DIVERGENCE, id="taught by a divergence, all at once", marks=pytest.mark.e2e),
        pytest.param(TAUGHT, 3, DIVERGENCE_BY_SOURCE, id="taught by a divergence by source, all at once"),
        pytest.param(TAUGHT, 3, ITSELF, id="taught by its average, all at once"),
        pytest.param(TAUGHT, 3, ITS_DIVERGENCE, id="taught by a divergence from its average, all at once"),
        pytest.param(WARM, 3, {}, id="warm start"),
        pytest.param(ALL_AT_ONCE, 12, {}, id="all at once, often", marks=pytest.mark.e2e),
        pytest.param(ADAPTER, 4, {}, id="adapter", marks=pytest.mark.e2e),
    ],
)
def test_a_training_killed_at_any_micro_step_ends_with_the_same_weights(
    values: dict[str, Any], tmp_path: Path, keys: dict[str, Any], kills: int, teacher: dict[str, Any]
) -> None:
    by_source = teacher is BY_SOURCE or teacher is DIVERGENCE_BY_SOURCE
    if by_source:
        values = two_sources(Path(values["model"]["name_or_path"]), tmp_path)
        add_teachers(values, {"other": make_model(tmp_path / "other", hidden_size=48)}, tmp_path)
        final = {"name": "final", "data": str(write_sums(tmp_path / "final.parquet", 80, 86)), "source": "sums"}
        values["evaluation"] = {"sets": [final]}
    values = with_keys(values, **keys)
    if keys is TAUGHT:
        model = {} if "template" in teacher else {"model": str(make_model(tmp_path / "teacher", hidden_size=32))}
        values["teacher"] = {"weight": 0.5, **model, **teacher}
    if keys is WARM:
        values["warm_start"] = {"demonstrations": "shown.parquet", "batch_size": 6, "max_steps": 6}

    def made(name: str) -> Path:
        if by_source:
            return sources_run(tmp_path / name, values)
        run = make_run(tmp_path / name, values, killing.NUMBER_OF_PROMPTS)
        if keys is WARM:  # in the place where `assert_same` looks
            demonstrate(run, random.Random(1), output="training")
        return run

    options = ["--warm-start", "--output", "training"] if keys is WARM else []

    def train(run: Path, kill_at: int = 0) -> int:
        return killing.train(run, kill_at, options=[*options[:2], *(str(run / each) for each in options[2:])])

    whole = made("whole")
    assert train(whole) == 0
    passes = int((whole / "passes").read_text())
    runs = []
    for position in range(kills):
        kill_at = 1 + position * passes // kills + position % 2
        run = made(f"killed-at-{kill_at}")
        assert os.WTERMSIG(train(run, kill_at)) == signal.SIGKILL
        assert train(run) == 0
        assert_same(run, whole)
        runs.append(run)
    resumed = {json.loads((run / "training" / "result.json").read_text())["resumed_at_step"] for run in runs}
    assert len(resumed) > 2, "kills fell between different checkpoints"


@pytest.mark.slow
def test_a_step_whose_evaluation_was_interrupted_is_recorded_once_whatever_follows(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped in the evaluation after step 2, resumed, killed after step 3, resumed, rolled back at step 4."""
    keys = {"not_finite_action": "roll_back", "max_steps": 5, "eval_steps": 2, "save_steps": 100}
    run = make_run(tmp_path / "run", with_keys(values, **keys))
    with monkeypatch.context() as patch, pytest.raises(Stopped):
        patch.setattr("grpo_core.training.held_out.sample_and_score", _signalled(held_out.sample_and_score, 1))
        train(run, run / "training")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(trainer, "update", _failing(trainer.update, 2, KeyboardInterrupt))
        train(run, run / "training")
    first = figures_of(run)
    assert [row["step"] for row in first] == [1, 2, 3]
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "update", _failing(trainer.update, 2, NotFiniteError("step 4")))
        result = train(run, run / "training")
    assert (result["resumed_at_step"], result["roll_backs"]) == (2, 1)
    assert [row["step"] for row in figures_of(run)] == [1, 2, 3, 4, 5]
    assert figures_of(run)[:2] == first[:2]


def _failing(function: Any, call: int, error: BaseException | type[BaseException]) -> Any:
    """The function, whose call number `call` raises."""
    calls = itertools.count(1)

    def failing(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == call:
            raise error
        return function(*args, **kwargs)

    return failing


@pytest.mark.slow
def test_what_was_stopped_early_and_killed_before_its_result_has_the_metrics_of_its_last_step(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {"save_steps": 1, "eval_steps": 1, "early_stopping_patience": 1, "learning_rate": 1e-9}
    run = make_run(tmp_path / "run", with_keys(values, **keys))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(trainer, "save_model", _interrupt)
        train(run, run / "training")
    result = train(run, run / "training")
    last = json.loads((run / "training" / "metrics.jsonl").read_text().splitlines()[-1])
    assert result["resumed_at_step"] == result["stopped_early_at_step"] == last.pop("step")
    assert result["metrics"] == {name: value for name, value in last.items() if name != "timestamp"}


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def drawing(completions: list[str]) -> list[float | None]:
    """Draws from NumPy and torch: threads that earlier tests left may draw from Python's own generator at any time."""
    return [np.random.rand() + float(torch.rand(())) for _ in completions]


def test_all_generators_that_a_reward_may_draw_from_are_set_back() -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), np.random.rand(), float(torch.rand(()))

    before = random_state()
    drawn = draw()
    assert draw() != drawn
    set_random_state(before)
    assert draw() == drawn


@pytest.mark.slow
def test_a_reward_that_draws_random_numbers_draws_the_same_ones_again(values: dict[str, Any], tmp_path: Path) -> None:
    values["rewards"] = [{"function": "tests.grpo_core.training.test_resume:drawing"}]
    run, whole = interrupted(values, tmp_path)
    train(run, run / "training")
    assert_same(run, whole)


PLACES = {  # where the signal comes, and at which call
    "sampling": ("grpo_core.rollout.rows.draw", 30),
    "weights of the average": ("grpo_core.model.loading.load_trainable_state", 10),  # in the pass after step 5
    "scoring": ("grpo_core.rollout.collect.score_arriving", 9),
    "backward pass": ("torch.Tensor.backward", 20),
    "optimizer step": ("torch.optim.AdamW.step", 5),
    "evaluation": ("grpo_core.training.held_out.sample_and_score", 2),
    "log": ("grpo_core.training.log.TrainingLog.step", 7),
}

RARER = ("backward pass", "optimizer step")  # in `make e2e`


def _drawing(values: dict[str, Any]) -> dict[str, Any]:
    rewards = [{"function": "tests.grpo_core.training.test_resume:drawing"}]
    return with_keys({**values, "rewards": rewards, "teacher": {"weight": 0.5, **ITSELF}}, **ALL_AT_ONCE)


@pytest.fixture(scope="module")
def undisturbed(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    return trained_run(folder / "run", _drawing(config_values(model_folder, folder)))


@pytest.mark.slow
@pytest.mark.parametrize("place", [pytest.param(it, marks=[pytest.mark.e2e] * (it in RARER)) for it in PLACES])
def test_a_training_told_to_stop_saves_its_last_complete_update_and_goes_on_from_there(
    values: dict[str, Any], undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    run = make_run(tmp_path / "run", _drawing(values))
    target, call = PLACES[place]
    with monkeypatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(target, _signalled(pkgutil.resolve_name(target), call))
        train(run, run / "training")
    complete = len(figures_of(run)) + (place == "evaluation")  # which is still to be made, and the metrics with it
    checkpoints = sorted(folder.name for folder in (run / "training" / "checkpoints").iterdir())
    assert complete
    assert checkpoints[-1] == f"step-{complete:06d}"
    result = train(run, run / "training")
    assert result["resumed_at_step"] == complete
    assert_same(run, undisturbed)


def _signalled(function: Any, call: int) -> Any:
    """The function, SIGTERM coming in the middle of its call number `call`."""
    calls = itertools.count(1)

    @functools.wraps(function)
    def signalled(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == call:
            signal.raise_signal(signal.SIGTERM)
        return function(*args, **kwargs)

    return signalled


def test_a_training_told_to_stop_before_its_first_update_has_nothing_to_save(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run", values)
    monkeypatch.setattr(update, "token_losses", _signalled(update.token_losses, 1))
    with pytest.raises(Stopped):
        train(run, run / "training")
    assert not (run / "training" / "checkpoints").exists()


def test_what_swallows_or_renames_a_stop_is_no_failure(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values["rewards"] = [{"function": "tests.grpo_core.training.test_resume:clumsy"}]
    run = make_run(tmp_path / "run", values)
    with pytest.raises(Stopped):
        train(run, run / "training")
    assert [f.name for f in (run / "training" / "checkpoints").iterdir()] == ["step-000001"]


def clumsy(completions: list[str], calls: list[int] = []) -> list[float]:  # noqa: B006
    calls.append(1)
    try:
        if len(calls) == 2:
            signal.raise_signal(signal.SIGTERM)
    except KeyboardInterrupt:
        raise ValueError("interrupted") from None
    return [float(len(completion)) for completion in completions]


def test_a_checkpoint_of_another_configuration_is_refused(values: dict[str, Any], tmp_path: Path) -> None:
    run, _ = interrupted(values, tmp_path)
    config = load_config(run / "config.toml", ["train.learning_rate=0.5"])
    (run / "config.toml").write_text(dump_config(config))
    with pytest.raises(CheckpointError, match="another configuration"):
        train(run, run / "training")


@pytest.mark.slow
def test_a_checkpoint_of_another_batch_is_refused_with_the_values_that_keep_it(
    values: dict[str, Any], tmp_path: Path
) -> None:
    run, whole = interrupted(with_keys(values, adam_epsilon=1e-3), tmp_path)  # 8 completions in each of 2 micro-steps
    change = ["train.per_device_train_batch_size=4"]
    (run / "config.toml").write_text(dump_config(load_config(run / "config.toml", change)))
    with pytest.raises(CheckpointError, match="per_device_train_batch_size=4, gradient_accumulation_steps=4") as caught:
        train(run, run / "training")
    assert "completions per update: 16" in str(caught.value)
    change = ["train.per_device_train_batch_size=16", "train.gradient_accumulation_steps=1"]
    config = load_config(run / "config.toml", change)
    plan = make_plan(plan_inputs(config, 24))
    (run / "config.toml").write_text(dump_config(config))
    (run / "plan.json").write_text(json.dumps({"plan": dataclasses.asdict(plan)}))
    result = train(run, run / "training")
    assert are_close(run, whole)
    assert result["tokens_per_pass"] == 2 * result_of(whole)["tokens_per_pass"], "room for more was not memory run out"
    assert not result["ran_out_of_memory"]


@pytest.mark.slow
@pytest.mark.parametrize("changed", ["train", "eval", "reward"])
def test_a_checkpoint_of_other_data_or_rewards_is_refused(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    (tmp_path / "own_rewards.py").write_text(
        "def f(completion_ids): return [float(len(ids)) for ids in completion_ids]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_rewards", raising=False)
    values["rewards"] = [{"function": "own_rewards:f"}]
    values["train"]["eval_steps"] = 3
    run, _ = interrupted(values, tmp_path)
    if changed == "reward":
        with (tmp_path / "own_rewards.py").open("a") as file:
            file.write("# another\n")
    else:
        write_sums(run / "dataset" / f"{changed}.parquet", 70, 94)
    with pytest.raises(CheckpointError, match="with other data or other reward functions"):
        train(run, run / "training")


WATCHING = ["health.max_kl=3", "rewards.0.timeout=7", "rollout.max_sync_drift=0.5"]
RESOURCES = ["rollout.gpu_memory_utilization=0.5", "rollout.cpu_kv_cache_gib=2", "train.gradient_checkpointing=true"]
DISK = ["train.save_steps=1", "train.save_total_limit=1"]


@pytest.mark.slow
@pytest.mark.parametrize("keys", [WATCHING, RESOURCES, DISK], ids=["limits", "memory", "disk"])
def test_a_key_that_results_do_not_follow_from_may_be_changed_and_the_training_goes_on(
    values: dict[str, Any], tmp_path: Path, keys: list[str]
) -> None:
    run, whole = interrupted(values, tmp_path)
    (run / "config.toml").write_text(dump_config(load_config(run / "config.toml", keys)))
    train(run, run / "training")
    assert_same(run, whole)


@pytest.mark.e2e
def test_a_training_with_vllm_killed_and_resumed_ends_with_the_same_weights(
    values: dict[str, Any], tmp_path: Path
) -> None:
    keys = {"engine": "vllm", "max_steps": 5, "save_steps": 2, "num_iterations": 2, "steps_per_generation": 4}
    config = with_keys(values, **keys)
    (tmp_path / "start.py").write_text(
        "import sys; from pathlib import Path; from tests.grpo_core.training.killing import train\n"
        "status = train(Path(sys.argv[1]), int(sys.argv[2])); sys.exit(status & 0x7F)\n"
    )
    whole, run = (make_run(tmp_path / name, config) for name in ("whole", "run"))

    def start(folder: Path, kill_at: int) -> int:
        command = [sys.executable, str(tmp_path / "start.py"), str(folder), str(kill_at)]
        environment = {**os.environ, "PYTHONPATH": python_path(ROOT)}
        return subprocess.run(command, cwd=ROOT, env=environment, timeout=600).returncode

    assert start(whole, 0) == 0
    for step in figures_of(whole):
        assert step["sampling/sampling_logp_difference/max"] < 1e-4
        assert step["grad_norm"] > 0
    assert start(run, int((whole / "passes").read_text()) - 2) == 9
    assert len(figures_of(run)) >= 4
    assert start(run, 0) == 0
    assert json.loads((run / "training" / "result.json").read_text())["resumed_at_step"] == 4
    assert_same(run, whole)


def test_every_weight_and_count_of_a_run_is_in_its_checkpoint(values: dict[str, Any], tmp_path: Path) -> None:
    """The state on disk, read without the project's own code, holds what the last step reported."""
    run = make_run(tmp_path / "run", with_keys(values, max_steps=4, save_steps=3, beta=0.1, num_iterations=2))
    train(run, run / "training")
    state = torch.load(run / "training" / "checkpoints" / "step-000003" / "state.pt", weights_only=True)
    plan = load_plan(run / "plan.json")
    assert state["model"].keys() == load_file(run / "training" / "model" / "model.safetensors").keys()
    assert state["state"]["updates"] == 3
    assert state["state"]["rollout"]["index"] == plan.counts(3)["rollouts"] - 1
    assert state["optimizer"].keys() == state["model"].keys()
