"""A sharded training, by real processes over gloo: it ends with the weights of one process that holds the whole."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.command import python_path
from grpo_core.planning.tokens_per_pass import read_limit
from grpo_core.training.loop import train
from tests.conftest import config_values, make_model, make_run, with_keys
from tests.grpo_core.training.launching import REWARD, finish, kill_tree, processes, started
from tests.grpo_core.training.several import exit_statuses, in_processes, in_two_processes
from tests.grpo_core.training.test_loop import CALM_ADAM
from tests.grpo_core.training.training import result_of, trained_run

pytestmark = pytest.mark.served

TOGETHER = {"steps_per_generation": 4, "gradient_accumulation_steps": 2, "beta": 0.1}
TIED = {"tie_word_embeddings": True}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 32}
LORA = {"use_peft": True, "lora_r": 4, "beta": 0.1}


@pytest.fixture
def reward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "patience.py").write_text(REWARD)
    monkeypatch.setenv("STUCK_AT", "0")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("patience", None)


def weights(run: Path) -> dict[str, Tensor]:
    """The trained model's weights by name, whatever files they are in."""
    return {
        name: tensor
        for file in (run / "training" / "model").glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Largest difference of a weight; the names are the same."""
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


# The module of a reward, in which rank 1 runs out of memory in training passes of more than 40 completion tokens.
SMALL = """
import os, torch
from grpo_core.model import policy
computed = policy.chosen_logprobs
def in_little_memory(hidden, weight, targets, temperature):
    if os.environ["RANK"] == "1" and torch.is_grad_enabled() and len(targets) > 40:
        raise torch.OutOfMemoryError("pretended")
    return computed(hidden, weight, targets, temperature)
policy.chosen_logprobs = in_little_memory
def score(completion_ids):
    return [-float(len(ids)) for ids in completion_ids]
"""


_scorings = itertools.count(1)


def deadly(completion_ids: list[list[int]]) -> list[float]:
    """Kills its process at the scoring that $KILLED_AT numbers."""
    if next(_scorings) == int(os.environ.get("KILLED_AT", "0")):
        os.kill(os.getpid(), signal.SIGKILL)
    return [-float(len(ids)) for ids in completion_ids]


@pytest.mark.parametrize(
    "division",
    [
        {"num_processes": 1, "sharding": "none", "per_device_train_batch_size": 12},
        pytest.param({"num_processes": 3, "per_device_train_batch_size": 4}, marks=pytest.mark.e2e),
    ],
    ids=["one whole", "three"],
)
def test_a_sharded_training_that_was_killed_goes_on_bit_for_bit_and_by_other_numbers_of_processes_too(
    tmp_path: Path, division: dict[str, Any]
) -> None:
    model = make_model(tmp_path / "model", **TIED)
    values = config_values(model, tmp_path, engine="transformers", save_steps=2, max_steps=6, sharding="full")
    values["rewards"] = [{"function": "tests.grpo_core.training.test_sharding:deadly"}]
    values["teacher"] = {"template": "{answer}={prompt}", "update_rate": 0.3, "weight": 0.5}
    keys = {**CALM_ADAM, "steps_per_generation": 4, "gradient_accumulation_steps": 2, "eval_steps": 3, "beta": 0.1}
    keys |= {"sync_ref_model": True, "ref_model_sync_steps": 2, "load_best_model_at_end": True}
    values = with_keys(values, **keys, per_device_train_batch_size=6, num_processes=2)
    whole = make_run(tmp_path / "whole", values)
    in_two_processes(tmp_path / "undisturbed", lambda _: train(whole, whole / "training"))
    run = make_run(tmp_path / "run", values)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KILLED_AT", "4")
        assert all(exit_statuses(2, tmp_path / "killed", lambda _: train(run, run / "training")))
    names = [folder.name for folder in (run / "training" / "checkpoints").iterdir() if not folder.suffix]
    assert "step-000002" in names

    copy = make_run(tmp_path / "copy", with_keys(values, **division))
    shutil.copytree(run / "training", copy / "training")
    in_processes(division["num_processes"], tmp_path / "divided", lambda _: train(copy, copy / "training"))
    assert distance(weights(whole), weights(copy)) < 5e-6
    in_two_processes(tmp_path / "continued", lambda _: train(run, run / "training"))
    assert distance(weights(whole), weights(run)) == 0
    assert result_of(copy)["resumed_at_step"] == result_of(run)["resumed_at_step"] in (2, 4)


@pytest.mark.e2e
def test_memory_that_runs_out_in_one_process_is_spared_by_all_from_the_next_start_on(
    tmp_path: Path, reward: None
) -> None:
    (tmp_path / "small.py").write_text(SMALL)
    values = config_values(make_model(tmp_path / "model"), tmp_path, engine="transformers", save_steps=1, **CALM_ADAM)
    values["rewards"] = [{"function": "patience:patient"}]
    one = trained_run(tmp_path / "one", values, per_device_train_batch_size=24)
    values["rewards"] = [{"function": "small:score"}]
    both = with_keys(values, per_device_train_batch_size=12, num_processes=2, sharding="full")
    run = make_run(tmp_path / "run", both)
    limits: list[int | None] = []
    for _ in range(4):
        limits.append(read_limit(run / "training"))
        with started(run, tmp_path, 0, *processes(2)) as process:
            output, _ = process.communicate()
        if process.returncode == 0:
            break
        assert "processes that share a model cannot go back alone" in output, output
    assert process.returncode == 0
    assert limits[0] is None
    assert [*limits[1:]] == sorted({limit for limit in limits[1:] if limit}, reverse=True)
    assert len(limits) > 1
    assert distance(weights(one), weights(run)) < 2e-6


@pytest.mark.e2e
@pytest.mark.parametrize("adapts", [False, True], ids=["experts", "adapter"])
def test_a_sharded_evaluation_finds_what_one_process_finds(tmp_path: Path, reward: None, adapts: bool) -> None:
    import polars as pl

    from grpo_core.evaluation.run import evaluate  # needs polars, which a training does not

    model = make_model(tmp_path / "model", *([] if adapts else ["Qwen3Moe"]), **({} if adapts else EXPERTS))
    values = config_values(model, tmp_path, engine="transformers", max_steps=2)
    if adapts:  # the base is what the training began with
        values = with_keys(values, **LORA, lora_target_modules=["q_proj", "down_proj"])
        first = trained_run(tmp_path / "first", values)
        values = with_keys(values, adapter=str(first / "training" / "adapter"))
    values["evaluation"] = {"num_samples": 3, "temperature": 0.7}
    run = trained_run(tmp_path / "run", values)
    expected = evaluate(run, run)
    shared = make_run(tmp_path / "shared", with_keys(values, num_processes=2, sharding="full"))
    shutil.copytree(run / "training", shared / "training")
    command = [*processes(2), "-m", "grpo_core.evaluate", str(shared), "--output", str(shared)]
    environment = {**os.environ, "PYTHONPATH": python_path(Path(__file__).parents[3]), "ACCELERATE_USE_CPU": "true"}
    subprocess.run([sys.executable, *command], env=environment, check=True)
    found = json.loads((shared / "report.json").read_text())
    assert found["key"] == expected["key"]
    one, both = (pl.read_parquet(folder / "samples.parquet") for folder in (run, shared))
    divergences = [name for name in one.columns if name.endswith("/kl")]
    assert divergences
    assert both.drop(divergences).equals(one.drop(divergences))
    for name in divergences:
        assert both[name].to_list() == pytest.approx(one[name].to_list(), abs=1e-5)


@pytest.mark.e2e
@pytest.mark.parametrize("keys", [{"beta": 0.1}, LORA], ids=["whole model", "adapter"])
def test_sharding_changes_an_update_in_bfloat16_by_less_than_bfloat16_does(
    tmp_path: Path, reward: None, keys: dict[str, Any]
) -> None:
    values = config_values(
        make_model(tmp_path / "model"), tmp_path, engine="transformers", max_steps=1, **CALM_ADAM, **keys
    )
    values["rewards"] = [{"function": "patience:patient"}]
    alone = {"per_device_train_batch_size": 16}
    plain = trained_run(tmp_path / "plain", values, **alone)
    one = trained_run(tmp_path / "one", values, mixed_precision="bf16", **alone)
    shared = make_run(tmp_path / "shared", with_keys(values, mixed_precision="bf16", num_processes=2, sharding="full"))
    with started(shared, tmp_path, 0, *processes(2)) as process:
        finish(process)
    assert 0 < distance(weights(one), weights(shared)) < distance(weights(one), weights(plain))


@pytest.mark.e2e
def test_moments_of_8_bits_go_on_bit_for_bit_with_the_same_shares_and_other_shares_are_refused(
    tmp_path: Path, reward: None
) -> None:
    model = make_model(tmp_path / "model", **TIED)
    values = config_values(model, tmp_path, engine="transformers", save_steps=2, max_steps=6, sharding="full")
    values["rewards"] = [{"function": "patience:patient"}]
    values = with_keys(values, **TOGETHER, optim="adamw_8bit", per_device_train_batch_size=6, num_processes=2)
    whole, run = (make_run(tmp_path / name, values) for name in ("whole", "run"))
    with started(whole, tmp_path, 0, *processes(2)) as process:
        finish(process)
    with started(run, tmp_path, 3, *processes(2)) as process:
        assert process.stdout is not None
        assert any("stuck" in line for line in process.stdout)
        kill_tree(process.pid)
    three = make_run(tmp_path / "three", with_keys(values, num_processes=3, per_device_train_batch_size=4))
    shutil.copytree(run / "training", three / "training")
    with started(run, tmp_path, 0, *processes(2)) as process:
        assert "continuing after step" in finish(process)
    assert distance(weights(whole), weights(run)) == 0
    with started(three, tmp_path, 0, *processes(3)) as process:
        output, _ = process.communicate()
    assert process.returncode
    assert "was written under another configuration" in output


@pytest.mark.e2e
def test_offloaded_moments_end_with_the_same_weights_and_go_on_with_and_without_offload_bit_for_bit(
    tmp_path: Path, reward: None
) -> None:
    model = make_model(tmp_path / "model", **TIED)
    values = config_values(model, tmp_path, engine="transformers", save_steps=2, max_steps=6, sharding="full")
    values["rewards"] = [{"function": "patience:patient"}]
    values = with_keys(values, **CALM_ADAM, **TOGETHER, per_device_train_batch_size=6, num_processes=2)
    offloaded = with_keys(values, offload="optimizer")
    plain, whole, run = (
        make_run(tmp_path / name, keys)
        for name, keys in {"plain": values, "whole": offloaded, "run": offloaded}.items()
    )
    for undisturbed in (plain, whole):
        with started(undisturbed, tmp_path, 0, *processes(2)) as process:
            finish(process)
    assert distance(weights(plain), weights(whole)) == 0
    with started(run, tmp_path, 3, *processes(2)) as process:
        assert process.stdout is not None
        assert any("stuck" in line for line in process.stdout)
        kill_tree(process.pid)
    without = make_run(tmp_path / "without", values)
    shutil.copytree(run / "training", without / "training")
    for continued in (run, without):
        with started(continued, tmp_path, 0, *processes(2)) as process:
            assert "continuing after step" in finish(process)
        assert distance(weights(plain), weights(continued)) == 0
