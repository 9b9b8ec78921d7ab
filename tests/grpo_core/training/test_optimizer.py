"""The optimizer: its first state, and the moments of 8 bits."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast, get_args

import pytest
import torch
from accelerate import Accelerator
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from transformers import get_scheduler

from grpo_core.config.files import parse_config
from grpo_core.config.training import TrainConfig
from grpo_core.distributed import gather_if_sharded, shard_mesh
from grpo_core.fingerprint import determining
from grpo_core.planning.plan import Plan
from grpo_core.training import optimizer as optimizers
from grpo_core.training.checkpoint import Checkpoints
from grpo_core.training.loop import train
from grpo_core.training.optimizer import AdamW8bit, learning_rate, make_optimizer
from grpo_core.training.state import TrainingState
from tests.conftest import config_values, with_keys
from tests.grpo_core.training.several import WORLD, in_two_processes
from tests.grpo_core.training.shares import shared_model, step_at_random
from tests.grpo_core.training.training import assert_same, interrupted, trained_run, weights_of

SETTINGS: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
PLACES = torch.arange(8192.0)
# Every thousandth weight after `_steps(10)` of torchao 0.18's AdamW8bit, uncompiled.
TORCHAO = [0.0, -0.7125437, -0.9321477, -0.8620205, -0.285744, 0.3766974, 0.8868921, 0.9615434, 0.5691286]


def _gradient(step: int) -> Tensor:
    return ((PLACES * (0.11 + 0.05 * step)).sin() * (1 + PLACES % 7)).view(64, 128)


def _steps(count: int, kind: Any = AdamW8bit, factor: float = 1.0, **settings: Any) -> Tensor:
    """A parameter after some steps."""
    parameter = torch.nn.Parameter((PLACES * 0.37).sin().view(64, 128))
    optimizer = kind([{"params": [parameter]}], **(SETTINGS | settings))
    for step in range(count):
        parameter.grad = _gradient(step) * factor
        optimizer.step()
    return parameter.detach()


def test_moments_of_8_bits_move_weights_as_those_of_torchao_do() -> None:
    found = _steps(10).flatten()[::1000]
    torch.testing.assert_close(found, torch.tensor(TORCHAO), atol=1e-6, rtol=0)
    plain = _steps(10, torch.optim.AdamW).flatten()[::1000]
    assert (plain - torch.tensor(TORCHAO)).abs().max() > 1e-4, "the bound tells them apart"


def test_the_first_step_is_that_of_adamw() -> None:
    """It rounds nothing that it uses."""
    torch.testing.assert_close(_steps(1), _steps(1, torch.optim.AdamW), atol=1e-7, rtol=0)


def test_ten_steps_end_near_those_of_adamw() -> None:
    plain = _steps(10, torch.optim.AdamW)
    moved = (plain - _steps(0)).abs().mean()
    assert (_steps(10) - plain).abs().mean() < 0.02 * moved


def test_gradients_of_any_size_are_rounded_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a power of two, so that nothing else rounds; squares of such gradients are below 1e-18."""
    odd = _gradient(0) + 0.5
    monkeypatch.setattr("tests.grpo_core.training.test_optimizer._gradient", lambda step: odd * (1 + step % 3))
    assert torch.equal(_steps(5, eps=0.0), _steps(5, factor=2.0**-34, eps=0.0))


def test_a_parameter_is_moved_part_by_part_as_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    at_once = _steps(3)
    monkeypatch.setattr(optimizers, "TOGETHER", 3 * optimizers.BLOCK)
    assert torch.equal(_steps(3), at_once)


def test_moments_of_8_bits_take_two_bytes_per_parameter_and_those_of_small_parameters_are_adamws() -> None:
    large, small, odd = (torch.nn.Parameter(torch.ones(size)) for size in (2**16, 4095, 4097))
    optimizer = AdamW8bit([{"params": [large, small, odd]}], **SETTINGS)
    copies = [torch.nn.Parameter(parameter.detach().clone()) for parameter in (small, odd)]
    plain = torch.optim.AdamW(copies, **SETTINGS)
    for _ in range(3):
        for parameter in (large, small, odd):
            parameter.grad = torch.randn_like(parameter)
        for copy, parameter in zip(copies, (small, odd), strict=True):
            copy.grad = parameter.grad
        optimizer.step()
        plain.step()
    assert sum(value.nbytes for value in optimizer.state[large].values()) == 4 + 2**16 * (2 + 2 * 4 / 256)
    for copy, parameter in zip(copies, (small, odd), strict=True):
        torch.testing.assert_close(parameter, copy, atol=1e-6, rtol=0)


@given(
    seed=st.integers(0, 99),
    optim=st.sampled_from(["adamw", "adamw_8bit"]),
    offload=st.sampled_from(["none", "optimizer"]),
)
def test_the_state_of_the_optimizer_is_what_its_first_step_would_start_from(
    seed: int, optim: str, offload: str
) -> None:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 2))
    keys = {"weight_decay": 0.1, "adam_beta1": 0.8, "optim": optim, "offload": offload}
    config = parse_config(config_values(Path("model"), Path("data"), **keys)).train
    before = [parameter.clone() for parameter in model.parameters()]
    optimizer = make_optimizer(model, config)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert optimizer.state.keys() == {*parameters}, "memory is taken"
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
    assert all(parameter.grad is None for parameter in parameters)

    copies = [torch.nn.Parameter(parameter.detach().clone()) for parameter in parameters]
    groups, taken = [], iter(copies)
    for group in optimizer.param_groups:
        groups.append({"params": [next(taken) for _ in group["params"]], "weight_decay": group["weight_decay"]})
        group["lr"] = 0.01
    settings = {"lr": 0.01, "betas": (0.8, config.adam_beta2), "eps": config.adam_epsilon}
    fresh: torch.optim.Optimizer
    fresh = (
        AdamW8bit(groups, **settings) if optim == "adamw_8bit" else torch.optim.AdamW(groups, fused=True, **settings)
    )
    for _ in range(3):
        for own, other in zip(parameters, copies, strict=True):
            own.grad = torch.randn_like(own)
            other.grad = own.grad.clone()
        optimizer.step()
        fresh.step()
    assert all(torch.equal(own, other) for own, other in zip(parameters, copies, strict=True))


CONFIG = parse_config(config_values(Path("model"), Path("data")))


@pytest.mark.slow
@pytest.mark.parametrize("copies", [1, 2])
def test_shares_are_moved_as_the_whole_and_their_moments_are_restored_bit_for_bit(tmp_path: Path, copies: int) -> None:
    alone = shared_model()
    settings = SETTINGS | {"lr": 0.01}
    plain = AdamW8bit([{"params": [*alone.parameters()]}], **settings)
    for step in range(4):
        step_at_random(alone, plain, step)

    def start(rank: int) -> None:
        os.environ["LOCAL_WORLD_SIZE"] = str(WORLD // copies)
        model = shared_model()
        fully_shard(model, mesh=shard_mesh(within_machine=copies > 1))
        optimizer = AdamW8bit([{"params": [*model.parameters()]}], **settings)
        checkpoints = Checkpoints(tmp_path / "run", "this run", CONFIG, Accelerator(cpu=True), model, optimizer, None)
        for step in range(2):
            step_at_random(model, optimizer, step)
        checkpoints.save(TrainingState(tokens_per_pass=1, updates=2), keep=1)

        def go_on() -> list[Tensor]:
            for step in (2, 3):
                step_at_random(model, optimizer, step)
            return [gather_if_sharded(parameter.detach()).clone() for parameter in model.parameters()]

        first = go_on()
        assert first[0].equal(alone.even.detach())
        assert first[2].equal(alone.one_row.detach())
        torch.testing.assert_close(first[1], alone.uneven.detach(), atol=1e-2, rtol=0)
        assert checkpoints.restore() is not None
        assert all(a.equal(b) for a, b in zip(go_on(), first, strict=True))

    in_two_processes(tmp_path, start)


@pytest.mark.parametrize(("optim", "same"), [("adamw", True), ("adamw_8bit", False)])
def test_results_follow_from_the_number_of_shares_if_moments_have_8_bits(optim: str, same: bool) -> None:
    def of(**keys: Any) -> dict[str, Any]:
        values = config_values(Path("model"), Path("data"), optim=optim, gradient_accumulation_steps=1, **keys)
        return determining(parse_config(values))["train"]

    two = of(sharding="full", num_processes=2, per_device_train_batch_size=12)
    four = of(sharding="full", num_processes=4, per_device_train_batch_size=6)
    assert (two == four) == same
    assert of(num_processes=2, per_device_train_batch_size=12) == of(num_processes=4, per_device_train_batch_size=6)
    assert of(per_device_train_batch_size=24).get("optim", TrainConfig().optim) == optim


@pytest.mark.slow
def test_a_training_that_was_interrupted_goes_on_bit_for_bit_and_ends_near_that_of_adamw(
    values: dict[str, Any], tmp_path: Path
) -> None:
    values = with_keys(values, learning_rate=1e-3)
    run, whole = interrupted(with_keys(values, optim="adamw_8bit"), tmp_path)
    train(run, run / "training")
    assert_same(run, whole)
    plain = weights_of(trained_run(tmp_path / "plain", values, max_steps=6, num_iterations=2))
    base, near = load_file(Path(values["model"]["name_or_path"]) / "model.safetensors"), weights_of(whole)
    moved, apart = (_distance(plain, other) for other in (base, near))
    assert 0 < apart < 0.03 * moved


def _distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return float(sum((one[name] - other[name]).square().sum() for name in one) ** 0.5)


@pytest.mark.parametrize("kind", get_args(TrainConfig.model_fields["lr_scheduler_type"].annotation))
@given(warmup=st.integers(0, 12), updates=st.integers(1, 12))
def test_the_learning_rate_is_that_of_the_schedule_in_transformers(kind: str, warmup: int, updates: int) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.3)
    scheduler = get_scheduler(kind, optimizer, warmup, updates)
    config = TrainConfig.model_construct(lr_scheduler_type=kind, learning_rate=0.3)
    plan = cast(Plan, SimpleNamespace(warmup_steps=warmup, max_steps=updates))
    for done in range(updates):
        (expected,) = scheduler.get_last_lr()
        assert learning_rate(config, plan, done) == expected
        optimizer.step()
        scheduler.step()
