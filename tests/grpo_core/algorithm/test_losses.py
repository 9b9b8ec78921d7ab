"""Losses and gradients against plain loops on random tensors; cuts, extremes and masks."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_core.algorithm.advantages import teacher_advantages
from grpo_core.algorithm.losses import token_losses, token_weights, top_entropy_mask
from grpo_core.config.algorithm import AlgorithmConfig
from grpo_core.config.losses import LOSSES
from tests.grpo_core.algorithm.plain_losses import Cut, PlainRow, plain
from tests.grpo_core.algorithm.test_losses_golden import ENTROPY, LOSS_TYPES, MASK, weights_of


@dataclass
class Batch:
    """Random rows, float64, and the settings of their loss."""

    logprobs: torch.Tensor
    old: torch.Tensor
    sampling: torch.Tensor | None
    reference: torch.Tensor
    keep: torch.Tensor
    mask: torch.Tensor
    advantages: torch.Tensor
    config: AlgorithmConfig
    teacher: torch.Tensor | None = None

    def loss(self, rows: list[int], weights: torch.Tensor) -> tuple[float, torch.Tensor]:
        """Loss of some rows and its gradient, zero in the other rows; cut to their longest, as a micro-batch is."""
        width = max(int(self.mask[rows].sum(1).max()), 1)
        leaf, advantages = self.logprobs.clone().requires_grad_(), self.advantages[rows]
        if self.teacher is not None:
            advantages = teacher_advantages(advantages, self.old[rows, :width], self.teacher[rows, :width], WEIGHT)
        losses = token_losses(
            leaf[rows, :width],
            self.old[rows, :width],
            self.mask[rows, :width],
            advantages,
            self.config,
            sampling_logprobs=None if self.sampling is None else self.sampling[rows, :width],
            ref_logprobs=self.reference[rows, :width] if self.config.beta > 0 else None,
            keep=self.keep[rows, :width],
        )
        loss = (weights[:, :width] * losses.loss).sum()
        (gradient,) = torch.autograd.grad(loss, leaf)
        return loss.item(), gradient


WEIGHT = 0.7  # of the teacher
OPTIONS: dict[str, Any] = {
    "epsilon": [0.0, 0.2],
    "epsilon_high": [None, 0.28],
    "importance_sampling_level": ["token", "sequence"],
    "beta": [0.0, 0.3],
    "use_bias_correction_kl": [False, True],
    "off_policy_mask_threshold": [None, 0.2],
    "vllm_importance_sampling_correction": [True, True, False],
    "vllm_importance_sampling_clip_max": [1.3, 3.0],
    "vllm_importance_sampling_clip_min": [None, 0.7],
    "vllm_importance_sampling_mode": ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"],
}


@st.composite
def configs(draw: st.DrawFn, loss_type: str) -> AlgorithmConfig:
    loss = plain(loss_type)
    options = OPTIONS | {key: [value] for key, value in loss.needs.items()} | dict(loss.drawn)
    drawn: dict[str, Any] = {key: draw(st.sampled_from(values)) for key, values in options.items()}
    return AlgorithmConfig(loss_type=loss_type, **drawn)


@st.composite
def batches(draw: st.DrawFn, loss_type: str, rows: int | None = None) -> Batch:
    b, t = rows or draw(st.integers(1, 6)), draw(st.integers(1, 5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    # On this grid no ratio comes so near to a bound that a finite difference reaches across it.
    logprobs, old, sampling, reference, teacher = -torch.randint(0, 128, (5, b, t), generator=generator).double() / 64
    logprobs -= 0.003
    lengths = torch.tensor(draw(st.lists(st.integers(0, t), min_size=b, max_size=b)))
    mask = (torch.arange(t) < lengths[:, None]).double()
    keep = (torch.rand(b, t, generator=generator) < draw(st.sampled_from([1.0, 0.5]))).double()
    advantages = torch.randn(b, generator=generator, dtype=torch.float64)
    advantages[torch.rand(b, generator=generator) < 0.2] = 0
    sampled = sampling if draw(st.booleans()) else None
    batch = Batch(logprobs, old, sampled, reference, keep, mask, advantages, draw(configs(loss_type)))
    return dataclasses.replace(batch, teacher=teacher) if draw(st.booleans()) else batch


def _plain_loss(
    batch: Batch, a: int, s: int, w: int, rollout_tokens: int, limit: int
) -> tuple[float, list[list[float]]]:
    """The loss by loops, and its gradient by central differences."""
    b, valid, loss, gradient = len(batch.mask), int(batch.mask.sum()), 0.0, []
    for i, lp in enumerate(batch.logprobs.tolist()):
        n = int(batch.mask[i].sum())
        weight = 1 / plain(batch.config.loss_type).divisor(Cut(n, valid, b, a, rollout_tokens, s, w, limit))
        of_row = (tensor[i, :n].tolist() for tensor in (batch.old, batch.reference, batch.keep))
        engine = None if batch.sampling is None else batch.sampling[i, :n].tolist()
        teacher = None if batch.teacher is None else batch.teacher[i, :n].tolist()
        row = PlainRow(batch.config, float(batch.advantages[i]), lp[:n], *of_row, engine, teacher, WEIGHT)
        loss += weight * row.loss(lp)
        gradient.append([weight * slope for slope in row.slopes()] + [0.0] * (len(lp) - n))
    return loss, gradient


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@given(data=st.data(), a=st.integers(1, 4), s=st.integers(1, 4), w=st.integers(1, 3), others=st.integers(1, 50))
def test_loss_and_gradient_are_those_of_plain_loops(
    loss_type: Any, data: st.DataObject, a: int, s: int, w: int, others: int
) -> None:
    batch = data.draw(batches(loss_type))
    tokens = int(batch.mask.sum()) + others
    weights = token_weights(
        LOSSES[loss_type].normaliser,
        batch.mask,
        micro_steps=a,
        rollout_tokens=tokens,
        steps_per_generation=s,
        num_processes=w,
        max_completion_length=9,
    )
    loss, gradient = batch.loss(list(range(len(batch.mask))), weights)
    plain_loss, plain_gradient = _plain_loss(batch, a, s, w, tokens, 9)
    assert loss == pytest.approx(plain_loss, rel=1e-5, abs=1e-7)
    for row, plain_row in zip(gradient.tolist(), plain_gradient, strict=True):
        assert row == pytest.approx(plain_row, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@given(data=st.data())
def test_a_batch_split_in_any_way_has_the_loss_and_gradient_of_the_whole(loss_type: Any, data: st.DataObject) -> None:
    batch = data.draw(batches(loss_type))
    rows = range(len(batch.mask))
    weights = weights_of(loss_type, batch.mask)
    part_of = data.draw(st.lists(st.integers(0, 2), min_size=len(rows), max_size=len(rows)))
    parts = [[i for i in rows if part_of[i] == part] for part in set(part_of)]
    loss, gradient = batch.loss(list(rows), weights)
    losses, gradients = zip(*(batch.loss(part, weights[part]) for part in parts), strict=True)
    assert sum(losses) == pytest.approx(loss, abs=1e-9)
    assert torch.allclose(sum(gradients), gradient, atol=1e-9)


def test_clipped_tokens_are_counted_on_the_side_on_which_the_clip_binds() -> None:
    config = AlgorithmConfig(epsilon=0.2, epsilon_high=0.3)
    ratios = torch.tensor([[0.5, 0.9, 1.25, 1.5]]).log()
    for advantage, low, high in ((1.0, [0, 0, 0, 0], [0, 0, 0, 1]), (-1.0, [1, 0, 0, 0], [0, 0, 0, 0])):
        metrics = token_losses(ratios, torch.zeros(1, 4), torch.ones(1, 4), torch.tensor([advantage]), config).metrics
        assert metrics["clip_ratio/low_mean"].tolist() == [low]
        assert metrics["clip_ratio/high_mean"].tolist() == [high]
        assert metrics["clip_ratio/region_mean"].tolist() == [[max(pair) for pair in zip(low, high, strict=True)]]


def test_cispo_counts_the_bounded_tokens_of_positive_advantages() -> None:
    config = AlgorithmConfig(loss_type="cispo", epsilon_high=1.4)
    ratios = torch.tensor([[1.3, 1.5], [1.3, 1.5]]).log()
    losses = token_losses(ratios, torch.zeros(2, 2), torch.ones(2, 2), torch.tensor([1.0, -1.0]), config)
    assert losses.metrics["cispo_clip_ratio"].tolist() == [[0, 1], [0, 0]]


@pytest.mark.parametrize(
    ("log_ratios", "k", "decay", "expected"),
    [
        ([30.0, -15.0], 0.1, 0.01, math.exp(0.01 + 0.1 * 5 - 0.01 * math.exp(5))),
        ([-30.0, 15.0], 0.1, 0.01, math.exp(0.01 - 0.1 * 5 - 0.01 * math.exp(-5))),
        ([-15.0, -15.0], 0.1, 0.01, math.exp(0.01 + 0.1 * math.log(1e-8) - 0.01 * 1e-8)),
        ([15.0, 15.0], 2.0, 1e-4, 0.0),
        ([15.0, 15.0], 2962.0, 2**-13, math.exp(2**-13 + 2962 * 20 - 2**-13 * math.exp(20))),
        ([6.0, 6.0], 2.0, 0.0, math.exp(1e-4 + 2 * 12 - 1e-4 * math.exp(12))),
    ],
)
def test_vespo_clamps_what_would_make_its_weight_extreme(
    log_ratios: list[float], k: float, decay: float, expected: float
) -> None:
    config = AlgorithmConfig(
        loss_type="vespo", vespo_k_pos=k, vespo_lambda_pos=decay, vllm_importance_sampling_mode="token_mask"
    )
    logprobs = torch.tensor([log_ratios], dtype=torch.float64)
    losses = token_losses(logprobs, torch.zeros_like(logprobs), torch.ones(1, 2), torch.ones(1), config)
    assert losses.metrics["vespo/phi_seq_mean"].tolist() == [pytest.approx([expected] * 2, rel=1e-5)]


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask"])
def test_padding_never_enters_the_sequence_weight_of_vespo(mode: Any) -> None:
    config = AlgorithmConfig(
        loss_type="vespo", vllm_importance_sampling_mode=mode, vllm_importance_sampling_clip_max=0.5
    )
    rows = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.2, -1.8]]), torch.ones(1, 2)
    sampling = torch.tensor([[-0.3, -0.5]])
    padded = [torch.nn.functional.pad(row, (0, 3)) for row in rows]
    short = token_losses(*rows, torch.ones(1), config, sampling_logprobs=sampling)
    long = token_losses(*padded, torch.ones(1), config, sampling_logprobs=torch.nn.functional.pad(sampling, (0, 3)))
    assert long.loss[:, :2].tolist() == short.loss.tolist()


def test_a_log_probability_that_is_not_a_number_is_not_masked_away_by_the_correction() -> None:
    sampling = torch.tensor([[-1.0, math.nan]])
    for mode in ("token_mask", "sequence_mask", "token_truncate", "sequence_truncate"):
        config = AlgorithmConfig(vllm_importance_sampling_mode=mode)
        row = torch.full((1, 2), -1.0)
        losses = token_losses(row, row, torch.ones(1, 2), torch.ones(1), config, sampling_logprobs=sampling)
        assert losses.loss[0, 1].isnan()


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_a_completion_without_valid_tokens_adds_nothing_and_breaks_nothing(loss_type: Any) -> None:
    mask = torch.tensor(MASK)
    mask[1] = 0
    weights = weights_of(loss_type, mask)
    assert weights.isfinite().all()
    assert weights[1].sum() == 0


@given(
    rows=st.lists(st.lists(st.integers(0, 6), min_size=4, max_size=4), min_size=1, max_size=4),
    seed=st.integers(0, 2**32),
    share=st.sampled_from([0.0625, 0.25, 0.5, 0.75, 1.0]),
)
def test_the_top_entropy_mask_keeps_the_valid_tokens_above_the_quantile(
    rows: list[list[int]], seed: int, share: float
) -> None:
    entropy = torch.tensor(rows) / 10
    mask = (torch.rand(entropy.shape, generator=torch.Generator().manual_seed(seed)) < 0.7).float()
    kept = top_entropy_mask(entropy, mask, share)
    assert kept.shape == mask.shape
    valid = sorted(value for value, m in zip(entropy.flatten().tolist(), mask.flatten().tolist(), strict=True) if m)
    for value, m, k in zip(entropy.flatten().tolist(), mask.flatten().tolist(), kept.flatten().tolist(), strict=True):
        if not m:
            assert k == 0
            continue
        rank = (len(valid) - 1) * (1 - share)
        below, above = valid[math.floor(rank)], valid[math.ceil(rank)]
        assert k == (value >= below + (above - below) * (rank - math.floor(rank)))


def test_a_share_of_one_keeps_every_valid_token() -> None:
    assert top_entropy_mask(torch.tensor(ENTROPY), torch.tensor(MASK), 1.0).tolist() == MASK


@given(
    levels=st.lists(st.integers(0, 6), min_size=2, max_size=40),
    seed=st.integers(0, 2**32),
    share=st.integers(1, 20).map(lambda twentieths: twentieths / 20),  # no level is just below the quantile
)
def test_entropies_that_tie_with_the_quantile_are_all_kept_however_they_are_rounded(
    levels: list[int], seed: int, share: float
) -> None:
    """Two passes round an entropy of some nats by up to 1e-6 differently."""
    entropy = torch.tensor([levels]) / 3
    noise = 1e-6 * (2 * torch.rand(entropy.shape, generator=torch.Generator().manual_seed(seed)) - 1)
    kept = top_entropy_mask(entropy + noise, torch.ones_like(entropy), share)
    assert kept.equal(top_entropy_mask(entropy, torch.ones_like(entropy), share))
    assert all(len(set(kept[entropy == level].tolist())) == 1 for level in entropy.unique())


def test_without_valid_tokens_no_token_is_kept() -> None:
    assert top_entropy_mask(torch.tensor(ENTROPY), torch.zeros(2, 4), 0.5).tolist() == [[0] * 4, [0] * 4]


@pytest.mark.slow
def test_the_quantile_has_no_limit_of_size() -> None:
    entropy = (torch.arange(17_000_000) % 100).float()[None]
    kept = top_entropy_mask(entropy, torch.ones_like(entropy), 0.25)
    assert kept.equal((entropy >= 75).float())
