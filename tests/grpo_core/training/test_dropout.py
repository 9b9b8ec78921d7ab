"""An adapter's dropout acts in the gradient alone: what is sampled, compared and reported is the policy without it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from torch import Tensor, nn

from grpo_core.training.batch import MicroBatch
from grpo_core.training.session import Session, load_session
from tests.conftest import config_values, make_run
from tests.grpo_core.model.exactness import (
    distance,
    first_update,
    gradient_and_metrics,
    move,
    plain_logprobs,
    plain_loss,
    rollout_with,
)

KEYS = {"use_peft": True, "lora_r": 4, "lora_dropout": 0.5, "max_grad_norm": 1e9}


@pytest.fixture
def session(request: pytest.FixtureRequest, smooth_model_folder: Path, tmp_path: Path) -> Iterator[Session]:
    """Ready to train, with an adapter that does something."""
    values = config_values(smooth_model_folder, tmp_path, **KEYS, **getattr(request, "param", {}))
    session = load_session(make_run(tmp_path / "run", values))
    torch.manual_seed(2)
    for name, parameter in session.model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.02)
    yield session
    AcceleratorState._reset_state(reset_partial_state=True)


def _batch(session: Session) -> MicroBatch:
    torch.manual_seed(0)
    return first_update(session, rollout_with(session, torch.randn(session.plan.generation_batch_size)))


def _leave_out_the_same(session: Session) -> None:
    """Dropout that leaves out the same features of each token, in both copies, so that passes can be compared."""
    for model in {session.policy.model, session.model}:
        for module in [module for module in model.modules() if isinstance(module, nn.Dropout)]:
            module.forward = partial(_every_other, module)  # type: ignore[method-assign]


def _every_other(module: nn.Module, x: Tensor) -> Tensor:
    return x * (torch.arange(x.shape[-1]) % 2 * 2) if module.training else x


def _expected(session: Session, batch: MicroBatch) -> list[Tensor]:
    """The loss where its log-probabilities are those of a plain pass without dropout, and behind it the derivative of
    a plain pass with dropout."""
    logprobs = plain_logprobs(session, batch).detach().requires_grad_()
    (behind,) = torch.autograd.grad(plain_loss(session, batch, logprobs), logprobs)
    with session.policy.dropout():
        plain_logprobs(session, batch).backward(behind)
    found = [p.grad for group in session.optimizer.param_groups for p in group["params"] if p.grad is not None]
    session.optimizer.zero_grad()
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "session",
    [
        {},
        {"num_iterations": 2, "beta": 0.1},
        {"gradient_checkpointing": True},
        {"loss_type": "cispo", "epsilon_high": 5.0, "num_iterations": 2},
    ],
    ids=["on-policy", "off-policy", "recomputing", "cispo"],
    indirect=True,
)
def test_the_gradient_goes_through_dropout_at_the_values_without_it(session: Session) -> None:
    batch = _batch(session)
    if session.plan.num_iterations > 1:
        move(session)
    _leave_out_the_same(session)
    expected = _expected(session, batch)
    found, metrics = gradient_and_metrics(session, batch)
    assert distance(found, expected) < 1e-5
    session.policy.dropouts = []
    without, same = gradient_and_metrics(session, batch)
    assert distance(found, without) > 0.1
    same["grad_norm"] = metrics["grad_norm"]
    assert metrics == pytest.approx(same, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("session", [{"mixed_precision": "bf16"}], indirect=True)
def test_masks_are_drawn_again_in_each_pass_and_follow_from_the_seed(session: Session) -> None:
    batch, found = _batch(session), []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        found.append(gradient_and_metrics(session, batch)[0])
    assert distance(found[0], found[1]) == 0 < 0.1 < distance(found[0], found[2])
    assert not any(module.training for module in session.policy.model.modules())


@pytest.mark.parametrize("session", [{}], indirect=True)
def test_layers_that_are_computed_again_leave_out_the_same(session: Session) -> None:
    batch, found = _batch(session), []
    for layers in (0, 2):
        session.policy.recompute(layers)
        torch.manual_seed(0)
        found.append(gradient_and_metrics(session, batch)[0])
    assert distance(*found) < 1e-6


def test_an_adapter_has_no_dropout_by_default(smooth_model_folder: Path, tmp_path: Path) -> None:
    values: dict[str, Any] = config_values(smooth_model_folder, tmp_path, use_peft=True)
    assert load_session(make_run(tmp_path / "run", values)).policy.dropouts == []
    AcceleratorState._reset_state(reset_partial_state=True)
