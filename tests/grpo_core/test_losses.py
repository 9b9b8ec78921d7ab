"""Losses and gradients against golden values taken from TRL 1.16 on fixed tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from grpo_core.losses import token_losses, token_weights

LOGPROBS = [[-0.5, -1.2, -0.3, -2.0], [-0.9, -0.1, -1.6, -0.7]]
OLD = [[-0.8, -1.0, -0.35, -2.6], [-0.7, -0.4, -1.5, -0.7]]
REFERENCE = [[-0.6, -1.1, -0.5, -2.2], [-1.0, -0.2, -1.2, -0.7]]
MASK = [[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 0.0]]
ADVANTAGES = [1.0, -0.5]

GRPO = [0, -0.102341, -0.131409, 0, 0.068228, 0.112488, 0.075403, 0]
DAPO = [0, -0.116962, -0.150182, 0, 0.058481, 0.096418, 0.064631, 0]
DR_GRPO = [0, -0.051171, -0.065704, 0, 0.025585, 0.042183, 0.028276, 0]
GSPO = [0, 0, 0, 0, 0.083333, 0.083333, 0.083333, 0]
CORRECTED_KL = [0.000771, -0.117429, -0.14898, 0.002082, 0.058949, 0.09719, 0.062563, 0]
PLAIN_KL = [0.000544, -0.117563, -0.149146, 0.001036, 0.059025, 0.096962, 0.061821, 0]


def _weights(loss_type: Any, mask: torch.Tensor, micro_steps: int = 1) -> torch.Tensor:
    return token_weights(
        loss_type,
        mask,
        micro_steps=micro_steps,
        rollout_tokens=7,
        steps_per_generation=micro_steps,
        num_processes=1,
        max_completion_length=8,
    )


def _loss(rows: slice, weights: torch.Tensor, **settings: Any) -> tuple[float, list[float], float]:
    logprobs = torch.tensor(LOGPROBS)[rows].requires_grad_()
    mask = torch.tensor(MASK)[rows]
    options = {"epsilon": 0.2, "epsilon_high": 0.2, **settings}
    losses = token_losses(logprobs, torch.tensor(OLD)[rows], mask, torch.tensor(ADVANTAGES)[rows], **options)
    loss = (weights[rows] * losses.loss).sum()
    loss.backward()
    kl = 0.0 if losses.kl is None else float((losses.kl * mask).sum() / mask.sum())
    assert logprobs.grad is not None
    return loss.item(), logprobs.grad.flatten().tolist(), kl


@pytest.mark.parametrize(
    ("loss_type", "settings", "loss", "gradient"),
    [
        ("grpo", {}, -0.277631, GRPO),
        ("bnpo", {}, -0.390470, DAPO),
        ("dapo", {}, -0.390470, DAPO),
        ("dr_grpo", {}, -0.170830, DR_GRPO),
        ("dapo", {"epsilon_high": 0.28}, -0.413327, DAPO),
        ("grpo", {"importance_sampling_level": "sequence"}, -0.350000, GSPO),
        ("dapo", {"beta": 0.04}, -0.389566, CORRECTED_KL),
        ("dapo", {"beta": 0.04, "use_bias_correction_kl": False}, -0.389619, PLAIN_KL),
    ],
)
def test_loss_and_gradient_are_those_of_trl(
    loss_type: str, settings: dict[str, Any], loss: float, gradient: list[float]
) -> None:
    if "beta" in settings:
        settings = {**settings, "ref_logprobs": torch.tensor(REFERENCE)}
    value, grad, _ = _loss(slice(None), _weights(loss_type, torch.tensor(MASK)), **settings)
    assert value == pytest.approx(loss, abs=1e-6)
    assert grad == pytest.approx(gradient, abs=1e-6)


@pytest.mark.parametrize(("corrected", "kl"), [(True, 0.022594), (False, 0.021281)])
def test_the_reported_kl_is_the_mean_over_tokens(corrected: bool, kl: float) -> None:
    settings = {"beta": 0.04, "ref_logprobs": torch.tensor(REFERENCE), "use_bias_correction_kl": corrected}
    weights = _weights("dapo", torch.tensor(MASK))
    assert _loss(slice(None), weights, **settings)[2] == pytest.approx(kl, abs=1e-6)


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
def test_two_micro_steps_of_one_row_give_the_gradient_of_one_of_two(loss_type: str) -> None:
    mask = torch.tensor(MASK)
    whole, gradient, _ = _loss(slice(None), _weights(loss_type, mask))
    halves = torch.cat([_weights(loss_type, mask[i : i + 1], micro_steps=2) for i in range(2)])
    first, second = (_loss(slice(i, i + 1), halves) for i in range(2))
    assert first[0] + second[0] == pytest.approx(whole, abs=1e-6)
    assert first[1] + second[1] == pytest.approx(gradient, abs=1e-6)


def test_clipped_tokens_are_counted_on_the_side_on_which_the_clip_binds() -> None:
    mask = torch.ones(1, 4)
    ratios = torch.tensor([[0.5, 0.9, 1.25, 1.5]]).log()
    for advantage, low, high in ((1.0, [0, 0, 0, 0], [0, 0, 0, 1]), (-1.0, [1, 0, 0, 0], [0, 0, 0, 0])):
        losses = token_losses(ratios, torch.zeros(1, 4), mask, torch.tensor([advantage]), epsilon=0.2, epsilon_high=0.3)
        assert losses.clipped_low.int().tolist() == [low]
        assert losses.clipped_high.int().tolist() == [high]


def test_a_completion_without_valid_tokens_adds_nothing_and_breaks_nothing() -> None:
    mask = torch.tensor(MASK)
    mask[1] = 0
    for loss_type in ("grpo", "bnpo", "dapo", "dr_grpo"):
        weights = _weights(loss_type, mask)
        assert weights.isfinite().all()
        assert weights[1].sum() == 0
