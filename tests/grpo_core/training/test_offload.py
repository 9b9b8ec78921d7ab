"""Moments that rest in the host's memory: where they are and when, and that nothing else changes."""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor
from torch.distributed.fsdp import fully_shard

from grpo_core.config.files import load_config, parse_config
from grpo_core.distributed import gather_if_sharded, shard_mesh
from grpo_core.fingerprint import determining
from grpo_core.training.checkpoint import Checkpoints
from grpo_core.training.loop import train
from grpo_core.training.optimizer import AdamW8bit, make_optimizer
from grpo_core.training.session import load_session
from grpo_core.training.state import TrainingState
from grpo_core.training.update import update
from tests.conftest import config_values, make_run, with_keys
from tests.grpo_core.model.exactness import START, first_update, rollout_with
from tests.grpo_core.training.several import WORLD, in_two_processes
from tests.grpo_core.training.shares import shared_model, step_at_random
from tests.grpo_core.training.training import assert_same, interrupted
from tests.pretend_gpu import Gpu, is_on_gpu, pretend_gpu

OFFLOADED = {"offload": "optimizer"}
KINDS: dict[str, dict[str, Any]] = {
    "float32": {"mixed_precision": "no"},
    "bf16, moments of 8 bits": {"optim": "adamw_8bit", "mixed_precision": "bf16"},
    "bf16, LoRA": {"use_peft": True, "lora_r": 4, "mixed_precision": "bf16"},
}


def _on_gpu(optimizer: torch.optim.Optimizer) -> list[list[Tensor]]:
    """The tensors of each state that are on the device, without the count of steps, where there are any."""
    states = [[it for it in state.values() if it.ndim and is_on_gpu(it)] for state in optimizer.state.values()]
    return [found for found in states if found]


class Watch:
    """Watches each step of an optimizer: how many parameters' moments are on the device, those that nothing needs any
    more among them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.most = 0
        self.seen: list[weakref.ref[Tensor]] = []
        for kind in (torch.optim.AdamW, AdamW8bit):
            monkeypatch.setattr(kind, "step", self._watching(kind.step))

    def _watching(self, step: Any) -> Any:
        def watched(optimizer: torch.optim.Optimizer) -> None:
            left = sum(it() is not None for it in self.seen)
            step(optimizer)
            found = _on_gpu(optimizer)
            self.most = max(self.most, len(found))
            self.seen = [weakref.ref(tensor) for tensors in found for tensor in tensors]
            if self.most == 1:
                assert left == 0, "the moments of the parameter before are still there"

        return watched


def _trained(run: Path, values: dict[str, Any]) -> tuple[list[dict[str, float]], list[Tensor], torch.optim.Optimizer]:
    """Metrics of two updates from one rollout, the weights after them, the optimizer."""
    session = load_session(make_run(run, values))
    torch.manual_seed(0)
    batch = first_update(session, rollout_with(session, torch.randn(session.plan.generation_batch_size)))
    metrics = [update(session, batch, START) for _ in range(2)]
    weights = [parameter.detach().cpu().clone() for parameter in session.model.parameters()]
    return metrics, weights, session.optimizer


def _check_rest(gpu: Gpu, optimizer: torch.optim.Optimizer) -> None:
    moments = [it for state in optimizer.state.values() for it in state.values() if it.ndim]
    assert moments
    assert all(it.device.type == "cpu" and it.is_pinned() for it in moments)
    assert not gpu.mismatches


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys",
    [pytest.param(KINDS[kind], id=kind, marks=[pytest.mark.e2e] * ("LoRA" in kind)) for kind in KINDS],
)
def test_moments_are_on_the_gpu_one_parameter_at_a_time_and_weights_are_those_without_offload(
    smooth_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any]
) -> None:
    watch = Watch(monkeypatch)
    values = config_values(smooth_model_folder, tmp_path, **keys, weight_decay=0.1)
    with pretend_gpu():
        expected, expected_weights, optimizer = _trained(tmp_path / "plain", values)
        assert watch.most == len(_on_gpu(optimizer)) == len(optimizer.state) > 1
    watch.most, watch.seen = 0, []
    with pretend_gpu() as gpu:
        metrics, weights, optimizer = _trained(tmp_path / "offloaded", with_keys(values, **OFFLOADED))
        _check_rest(gpu, optimizer)
    assert watch.most == 1
    assert metrics == expected
    assert all(a.equal(b) for a, b in zip(weights, expected_weights, strict=True))
    AcceleratorState._reset_state(reset_partial_state=True)


def test_all_gradients_are_there_when_the_first_moments_are_made() -> None:
    """Memory then runs out at the start or never."""
    made: list[int] = []
    config = parse_config(config_values(Path("model"), Path("data"), **OFFLOADED)).train
    with pretend_gpu() as gpu, pytest.MonkeyPatch.context() as patch:
        model = torch.nn.Linear(64, 64).to("cuda")
        step = torch.optim.AdamW.step

        def counted(optimizer: torch.optim.Optimizer) -> None:
            made.append(sum(parameter.grad is not None for parameter in model.parameters()))
            step(optimizer)

        patch.setattr(torch.optim.AdamW, "step", counted)
        optimizer = make_optimizer(model, config)
        _check_rest(gpu, optimizer)
    assert made == [2, 2]


@pytest.mark.slow
@pytest.mark.parametrize("first", ["none", "optimizer"])
def test_an_interrupted_training_goes_on_bit_for_bit_with_and_without_offload(
    values: dict[str, Any], tmp_path: Path, first: str
) -> None:
    run, undisturbed = interrupted(with_keys(values, offload=first), tmp_path)
    then = {"none": "optimizer", "optimizer": "none"}[first]
    written = (run / "config.toml").read_text()
    (run / "config.toml").write_text(written.replace(f'offload = "{first}"', f'offload = "{then}"'))
    assert load_config(run / "config.toml").train.offload == then
    train(run, run / "training")
    assert_same(run, undisturbed)


def test_results_do_not_follow_from_offload() -> None:
    values = config_values(Path("model"), Path("data"))
    assert determining(parse_config(values)) == determining(parse_config(with_keys(values, **OFFLOADED)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optim", "copies"),
    [
        ("adamw", 2),
        ("adamw_8bit", 1),
        pytest.param("adamw", 1, marks=pytest.mark.e2e),
        pytest.param("adamw_8bit", 2, marks=pytest.mark.e2e),
    ],
)
def test_shares_are_moved_bit_for_bit_and_restored_with_and_without_offload(
    tmp_path: Path, optim: str, copies: int
) -> None:
    configs = {
        offload: parse_config(config_values(tmp_path, tmp_path, learning_rate=0.1, optim=optim, offload=offload))
        for offload in ("none", "optimizer")
    }

    def start(rank: int) -> None:
        os.environ["LOCAL_WORLD_SIZE"] = str(WORLD // copies)
        results = []
        for offload, config in configs.items():
            model = shared_model()
            fully_shard(model, mesh=shard_mesh(within_machine=copies > 1))
            optimizer = make_optimizer(model, config.train)
            for group in optimizer.param_groups:
                group["lr"] = 0.01
            checkpoints = Checkpoints(tmp_path / offload, "", config, Accelerator(cpu=True), model, optimizer, None)
            for step in range(2):
                step_at_random(model, optimizer, step)
            checkpoints.save(TrainingState(updates=2), keep=1)
            checkpoints.wait()
            found = []
            # After its own checkpoint, and after that without offload.
            for folder in (None, tmp_path / offload, tmp_path / "none"):
                if folder is not None:
                    assert Checkpoints(folder, "", config, Accelerator(cpu=True), model, optimizer, None).restore()
                for step in (2, 3):
                    step_at_random(model, optimizer, step)
                found.append([gather_if_sharded(parameter.detach()).clone() for parameter in model.parameters()])
            results += found
        for found in results[1:]:
            assert all(a.equal(b) for a, b in zip(found, results[0], strict=True))

    in_two_processes(tmp_path, start)
