"""Losses and gradients against golden values taken from TRL 1.16, and against plain loops on random tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

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


@dataclass
class Batch:
    """Random rows, float64, and the settings of their loss."""

    logprobs: torch.Tensor
    old: torch.Tensor
    reference: torch.Tensor
    mask: torch.Tensor
    advantages: torch.Tensor
    options: dict[str, Any]

    def loss(self, rows: list[int], weights: torch.Tensor) -> tuple[float, torch.Tensor]:
        """Loss of some rows and its gradient, zero in the other rows; cut to their longest, as a micro-batch is."""
        width = max(int(self.mask[rows].sum(1).max()), 1)
        leaf = self.logprobs.clone().requires_grad_()
        options = {**self.options, "ref_logprobs": self.reference[rows, :width]}
        losses = token_losses(
            leaf[rows, :width], self.old[rows, :width], self.mask[rows, :width], self.advantages[rows], **options
        )
        loss = (weights[:, :width] * losses.loss).sum()
        (gradient,) = torch.autograd.grad(loss, leaf)
        return loss.item(), gradient


@st.composite
def batches(draw: st.DrawFn, rows: int | None = None) -> Batch:
    b, t = rows or draw(st.integers(1, 6)), draw(st.integers(1, 5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    logprobs, old, reference = -torch.rand(3, b, t, generator=generator, dtype=torch.float64) * 2
    lengths = torch.tensor(draw(st.lists(st.integers(0, t), min_size=b, max_size=b)))
    options = {
        "epsilon": draw(st.sampled_from([0.0, 0.2])),
        "epsilon_high": draw(st.sampled_from([0.2, 0.28])),
        "importance_sampling_level": draw(st.sampled_from(["token", "sequence"])),
        "beta": draw(st.sampled_from([0.0, 0.3])),
        "use_bias_correction_kl": draw(st.booleans()),
    }
    mask = (torch.arange(t) < lengths[:, None]).double()
    return Batch(logprobs, old, reference, mask, torch.randn(b, generator=generator, dtype=torch.float64), options)


def _plain_loss(batch: Batch, loss_type: str, a: int, s: int, w: int, rollout_tokens: int, limit: int) -> float:
    lp, old, ref = batch.logprobs.tolist(), batch.old.tolist(), batch.reference.tolist()
    o, total, valid = batch.options, 0.0, int(batch.mask.sum())
    for i, advantage in enumerate(batch.advantages.tolist()):
        n, row = int(batch.mask[i].sum()), 0.0
        for t in range(n):
            ratio = math.exp(lp[i][t] - old[i][t])
            if o["importance_sampling_level"] == "sequence":
                ratio = math.exp(sum(lp[i][u] - old[i][u] for u in range(n)) / n)
            clipped = min(max(ratio, 1 - o["epsilon"]), 1 + o["epsilon_high"])
            kl = math.exp(ref[i][t] - lp[i][t]) - (ref[i][t] - lp[i][t]) - 1
            kl *= ratio if o["use_bias_correction_kl"] else 1
            row += -min(ratio * advantage, clipped * advantage) + o["beta"] * kl
        match loss_type:
            case "grpo":
                total += row / max(n, 1) / len(lp) / a
            case "bnpo":
                total += row / max(valid, 1) / a
            case "dr_grpo":
                total += row / (len(lp) * limit) / a
            case "dapo":
                total += row / (rollout_tokens / w * a / s)
    return total


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo"])
@given(batch=batches(), a=st.integers(1, 4), s=st.integers(1, 4), w=st.integers(1, 3), others=st.integers(1, 50))
def test_the_loss_is_that_of_plain_loops(loss_type: Any, batch: Batch, a: int, s: int, w: int, others: int) -> None:
    tokens = int(batch.mask.sum()) + others
    weights = token_weights(
        loss_type,
        batch.mask,
        micro_steps=a,
        rollout_tokens=tokens,
        steps_per_generation=s,
        num_processes=w,
        max_completion_length=9,
    )
    loss, _ = batch.loss(list(range(len(batch.mask))), weights)
    assert loss == pytest.approx(_plain_loss(batch, loss_type, a, s, w, tokens, 9), rel=1e-5, abs=1e-9)


@given(batch=batches(), data=st.data())
def test_a_batch_split_in_any_way_has_the_loss_and_gradient_of_the_whole(batch: Batch, data: st.DataObject) -> None:
    rows = range(len(batch.mask))
    weights = _weights("grpo", batch.mask)
    part_of = data.draw(st.lists(st.integers(0, 2), min_size=len(rows), max_size=len(rows)))
    parts = [[i for i in rows if part_of[i] == part] for part in set(part_of)]
    loss, gradient = batch.loss(list(rows), weights)
    losses, gradients = zip(*(batch.loss(part, weights[part]) for part in parts), strict=True)
    assert sum(losses) == pytest.approx(loss, abs=1e-9)
    assert torch.allclose(sum(gradients), gradient, atol=1e-9)


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo"])
@given(data=st.data(), processes=st.integers(1, 3), micro_steps=st.integers(1, 3), per_device=st.integers(1, 2))
def test_processes_and_micro_steps_weigh_their_rows_so_that_the_update_stays_the_same(
    loss_type: Any, data: st.DataObject, processes: int, micro_steps: int, per_device: int
) -> None:
    b = processes * micro_steps * per_device
    batch = data.draw(batches(rows=b))
    common = {"rollout_tokens": max(int(batch.mask.sum()), 1), "max_completion_length": 9}
    one = token_weights(loss_type, batch.mask, micro_steps=1, steps_per_generation=1, num_processes=1, **common)
    loss, gradient = batch.loss(list(range(b)), one)
    cut = {"micro_steps": micro_steps, "steps_per_generation": micro_steps, "num_processes": processes}
    order = data.draw(st.permutations(range(b)))
    parts = [order[start : start + per_device] for start in range(0, b, per_device)]
    results = [batch.loss(part, token_weights(loss_type, batch.mask[part], **cut, **common)) for part in parts]
    assert sum(value for value, _ in results) / processes == pytest.approx(loss, rel=1e-5, abs=1e-9)
    assert torch.allclose(sum(grad for _, grad in results) / processes, gradient, rtol=1e-5, atol=1e-9)


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
