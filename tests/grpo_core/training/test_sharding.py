"""A sharded training, by real processes over gloo: it ends with the weights of one process that holds the whole."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

from tests.conftest import config_values, make_model, make_run, with_keys, write_sums
from tests.grpo_core.training.launching import REWARD, finish, kill_tree, processes, started
from tests.grpo_core.training.test_loop import CALM_ADAM, EVERYTHING
from tests.grpo_core.training.training import trained_run

pytestmark = pytest.mark.slow

TOGETHER = {"steps_per_generation": 4, "gradient_accumulation_steps": 2, "beta": 0.1}
TIED = {"tie_word_embeddings": True}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 32}
LORA = {"use_peft": True, "lora_r": 4, "beta": 0.1}
RECOMPUTED = {"gradient_checkpointing": True, "num_iterations": 2}


@pytest.fixture
def reward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "patience.py").write_text(REWARD)
    monkeypatch.setenv("STUCK_AT", "0")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("patience", None)


def weights(run: Path) -> dict[str, Tensor]:
    """Of the trained model, whatever files it is in."""
    return {
        name: tensor
        for file in (run / "training" / "model").glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Largest difference of a weight; the names are the same."""
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.mark.usefixtures("reward")
@pytest.mark.parametrize(
    ("architecture", "shape", "keys", "num_processes", "sharding"),
    [
        pytest.param("Qwen2", TIED, TOGETHER, 2, "full", id="tied head, KL, two updates a rollout"),
        pytest.param("Qwen3Moe", EXPERTS, EVERYTHING, 2, "full", id="experts, entropy mask and bonus, evaluation"),
        pytest.param("Qwen2", {}, LORA, 2, "full", id="adapter"),
        pytest.param("Llama", {}, RECOMPUTED, 2, "full", id="recomputed activations"),
    ],
)
def test_a_sharded_training_ends_with_the_weights_of_one_process(
    tmp_path: Path, architecture: str, shape: dict[str, Any], keys: dict[str, Any], num_processes: int, sharding: str
) -> None:
    model = make_model(tmp_path / "model", architecture, **shape)
    write_sums(tmp_path / "train.parquet", 10, 34)
    write_sums(tmp_path / "eval.parquet", 60, 76)
    values = config_values(model, tmp_path, engine="transformers")
    values["rewards"] = [{"function": "patience:patient"}]
    values = with_keys(values, **CALM_ADAM, **keys)
    b = 24 // num_processes
    one = trained_run(tmp_path / "one", values, per_device_train_batch_size=24)
    both = with_keys(values, per_device_train_batch_size=b, num_processes=num_processes, sharding=sharding)
    shared = make_run(tmp_path / "shared", both)
    with started(shared, tmp_path, 0, *processes(num_processes)) as process:
        finish(process)
    assert distance(weights(one), weights(shared)) < 2e-6


def test_a_sharded_training_that_was_killed_goes_on_bit_for_bit_and_by_other_numbers_of_processes_too(
    tmp_path: Path, reward: None
) -> None:
    model = make_model(tmp_path / "model", **TIED)
    values = config_values(model, tmp_path, engine="transformers", save_steps=2, max_steps=6, sharding="full")
    values["rewards"] = [{"function": "patience:patient"}]
    keys = {**CALM_ADAM, "steps_per_generation": 4, "gradient_accumulation_steps": 2, "eval_steps": 3, "beta": 0.1}
    keys |= {"sync_ref_model": True, "ref_model_sync_steps": 2, "load_best_model_at_end": True}
    values = with_keys(values, **keys, per_device_train_batch_size=6, num_processes=2)
    whole = make_run(tmp_path / "whole", values)
    with started(whole, tmp_path, 0, *processes(2)) as process:
        finish(process)
    run = make_run(tmp_path / "run", values)
    with started(run, tmp_path, 4, *processes(2)) as process:
        assert process.stdout is not None
        assert any("stuck" in line for line in process.stdout)
        kill_tree(process.pid)
    names = [folder.name for folder in (run / "training" / "checkpoints").iterdir() if not folder.suffix]
    assert "step-000002" in names

    others = {
        "one": {"num_processes": 1, "sharding": "none", "per_device_train_batch_size": 12},
        "three": {"num_processes": 3, "per_device_train_batch_size": 4},
    }
    for name, division in others.items():
        copy = make_run(tmp_path / name, with_keys(values, **division))
        shutil.copytree(run / "training", copy / "training")
        with started(copy, tmp_path, 0, *processes(division["num_processes"])) as process:
            assert "continuing after step" in finish(process)
        assert distance(weights(whole), weights(copy)) < 5e-6
    with started(run, tmp_path, 0, *processes(2)) as process:
        assert "continuing after step" in finish(process)
    assert distance(weights(whole), weights(run)) == 0


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
