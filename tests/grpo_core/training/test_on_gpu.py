"""A training on a GPU, from its first checkpoint to its result, on the pretended device. As accelerate gives it to a
single process, it has no index."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import PartialState
from safetensors.torch import load_file

from grpo_core.model.loading import saved_name
from grpo_core.training import checkpoint, loop
from grpo_core.training.checkpoint_write import in_thread
from grpo_core.training.interrupt import Stopped
from grpo_core.training.loop import train
from tests.conftest import config_values, make_run
from tests.grpo_core.training.several import in_two_processes
from tests.grpo_core.training.training import (
    assert_same,
    checkpoint_of,
    figures_of,
    metrics_of,
    result_of,
    weights_of,
    write_when_waited_for,
)
from tests.pretend_gpu import Gpu, needs_cpu_build, pretend_gpu

pytestmark = pytest.mark.served

# The second evaluation, which is worse than the first, ends the training.
LIFE = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "max_completion_length": 4,
    "max_steps": 8,
    "save_steps": 1,
    "save_total_limit": 8,
    "eval_steps": 2,
    "early_stopping_patience": 1,
    "load_best_model_at_end": True,
    "not_finite_action": "roll_back",
}
MOVING = {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 2}
ADAPTER = {"beta": 0.1, "use_peft": True, "lora_r": 4, "lora_dropout": 0.2, "gradient_checkpointing": True}
KINDS: dict[str, dict[str, Any]] = {
    "float32": {"mixed_precision": "no"},
    "bf16, moving reference, moments of 8 bits at rest": {**MOVING, "optim": "adamw_8bit", "offload": "optimizer"},
    "bf16, adapter with dropout, layers computed again, moments at rest": {**ADAPTER, "offload": "optimizer"},
}
SHARED: dict[str, dict[str, Any]] = {
    "sharded, moments of 8 bits at rest": {"sharding": "full", "optim": "adamw_8bit", "offload": "optimizer"},
    "sharded, adapter": {**ADAPTER, "sharding": "full"},
    "sharded, moving reference, moments at rest": {**MOVING, "sharding": "full", "offload": "optimizer"},
    "not sharded": {"mixed_precision": "no"},
}
RARER = [*KINDS][:2] + [*SHARED][1:]  # in `make e2e`


def sums(completion_ids: list[list[int]]) -> list[float | None]:
    """Tells almost all completions apart."""
    return [float(sum(ids)) for ids in completion_ids]


def _interfere(patch: pytest.MonkeyPatch, *, stopped: int | None = None, broken: int | None = None) -> None:
    """SIGTERM comes once, in update `stopped`. The loss of update `broken` is NaN, also once. Evaluations find the
    policy worse and worse."""
    update, evaluate, told = loop.update, loop.evaluate_policy, False

    def disturbed(session: Any, batch: Any, state: Any) -> dict[str, float]:
        nonlocal told
        if state.updates + 1 == stopped and not told:
            told = True
            signal.raise_signal(signal.SIGTERM)
        if state.updates + 1 == broken and not state.roll_backs:
            batch.weights.fill_(math.nan)
        return update(session, batch, state)

    def worse(session: Any, state: Any, folder: Path) -> dict[str, float]:
        return {**evaluate(session, state, folder), "eval_reward": -state.updates}

    patch.setattr(loop, "update", disturbed)
    patch.setattr(loop, "evaluate_policy", worse)


def _check_clean(gpu: Gpu) -> None:
    assert not gpu.mismatches
    assert not gpu.races
    assert not gpu.strays


def _write_immediately(patch: pytest.MonkeyPatch) -> None:
    """Each checkpoint is written before the training goes on, by its thread."""

    def begun(work: Callable[[], None]) -> Future[None]:
        done = in_thread(work)
        done.exception()
        return done

    patch.setattr(checkpoint, "in_thread", begun)


def _saved_weights(run: Path) -> dict[str, torch.Tensor]:
    """What was trained, as it is saved for others."""
    adapter = run / "training" / "adapter" / "adapter_model.safetensors"
    return load_file(adapter) if adapter.exists() else weights_of(run)


def _tensors(saved: dict[str, Any], prefix: str = "") -> dict[str, torch.Tensor]:
    found = {}
    for name, value in saved.items():
        found |= _tensors(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}


@pytest.mark.parametrize("kind", [pytest.param(it, marks=[pytest.mark.e2e] * (it in RARER)) for it in KINDS])
def test_a_training_is_stopped_goes_on_rolls_back_and_ends_with_its_best_policy_as_one_that_is_not_stopped(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The checkpoints of the one are written as late as possible, those of the other as early as possible."""
    values = config_values(model_folder, tmp_path, **LIFE, **KINDS[kind])
    values["rewards"].append({"function": "tests.grpo_core.training.test_on_gpu:sums"})
    whole, run = (make_run(tmp_path / name, values) for name in ("whole", "run"))
    with pretend_gpu() as gpu, monkeypatch.context() as patch:
        _interfere(patch, broken=4)
        _write_immediately(patch)
        train(whole, whole / "training")
        _check_clean(gpu)
    with pretend_gpu() as gpu, monkeypatch.context() as patch:
        _interfere(patch, stopped=3, broken=4)
        write_when_waited_for(patch)
        with pytest.raises(Stopped):
            train(run, run / "training")
        train(run, run / "training")
        _check_clean(gpu)
    result = result_of(run)
    assert result["resumed_at_step"] == 2
    assert (result["roll_backs"], result["best_step"], result["stopped_early_at_step"]) == (1, 2, 4)
    assert [row["step"] for row in metrics_of(run)] == [1, 2, 3, 4]
    assert all(row["grad_norm"] > 0 for row in metrics_of(run))
    assert_same(run, whole)
    ended = [_tensors(checkpoint_of(folder, 3)) for folder in (run, whole)]
    assert ended[0].keys() == ended[1].keys()
    assert any("exp_avg" in name for name in ended[0])
    assert not [name for name, tensor in ended[0].items() if not tensor.equal(ended[1][name])]
    best = {saved_name(name): tensor for name, tensor in checkpoint_of(run, 2)["model"].items()}
    saved = _saved_weights(run)
    assert not [name for name, tensor in best.items() if not tensor.equal(saved[name])]


@pytest.mark.parametrize("kind", [pytest.param(it, marks=[pytest.mark.e2e] * (it in RARER)) for it in SHARED])
def test_two_processes_each_with_its_gpu_are_stopped_and_go_on_bit_for_bit(
    model_folder: Path, tmp_path: Path, kind: str
) -> None:
    needs_cpu_build()
    keys = {"max_steps": 3, "num_processes": 2, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}
    values = config_values(model_folder, tmp_path, save_steps=1, max_completion_length=4, **keys, **SHARED[kind])
    values["rewards"].append({"function": "tests.grpo_core.training.test_on_gpu:sums"})
    whole, run = (make_run(tmp_path / name, values) for name in ("whole", "run"))

    def work(rank: int, folder: Path, stops: bool) -> None:
        del os.environ["ACCELERATE_USE_CPU"]
        with pretend_gpu(index=rank, count=2) as gpu, pytest.MonkeyPatch.context() as patch:
            PartialState().backend = "gloo"  # accelerate believes that it is NCCL
            assert str(PartialState().device) == f"cuda:{rank}"
            _interfere(patch, stopped=2 if stops and rank == 1 else None)
            if folder == run:
                write_when_waited_for(patch)
            with pytest.raises(Stopped) if stops else nullcontext():
                train(folder, folder / "training")
            _check_clean(gpu)

    for number, (folder, stops) in enumerate([(whole, False), (run, True), (run, False)]):
        in_two_processes(tmp_path / f"group-{number}", partial(work, folder=folder, stops=stops))
    assert result_of(run)["resumed_at_step"] == 2
    assert all(row["grad_norm"] > 0 for row in metrics_of(run))
    assert figures_of(run) == figures_of(whole)
    weights = [weights_of(folder) for folder in (run, whole)]
    assert not [name for name, tensor in weights[0].items() if not tensor.equal(weights[1][name])]
    shares = [sorted((folder / "training" / "checkpoints").glob("step-*/*.distcp")) for folder in (run, whole)]
    assert len(shares[0]) == len(shares[1]) == (2 * 2 if values["train"].get("sharding") else 0)
    assert all(mine.read_bytes() == theirs.read_bytes() for mine, theirs in zip(*shares, strict=True))
