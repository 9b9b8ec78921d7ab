"""Losses and gradients against values that TRL 1.16 itself computes from the same tensors."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from grpo_core.algorithm.advantages import teacher_advantages
from grpo_core.algorithm.losses import TokenLosses, token_losses, token_weights, top_entropy_mask
from grpo_core.config.algorithm import AlgorithmConfig
from grpo_core.config.losses import LOSSES, LossType
from tests.grpo_core.algorithm.plain_losses import PLAIN_LOSSES, plain

LOSS_TYPES = get_args(LossType)

LOGPROBS = [[-0.5, -1.2, -0.3, -2.0], [-0.9, -0.1, -1.6, -0.7]]
OLD = [[-0.8, -1.0, -0.35, -2.6], [-0.7, -0.4, -1.5, -0.7]]
REFERENCE = [[-0.6, -1.1, -0.5, -2.2], [-1.0, -0.2, -1.2, -0.7]]
SAMPLING = [[-0.6, -1.3, -0.2, -2.9], [-0.5, -0.3, -1.1, -0.7]]
ENTROPY = [[0.3, 0.9, 0.1, 1.4], [0.7, 0.2, 1.1, 5.0]]
MASK = [[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 0.0]]
ADVANTAGES = [1.0, -0.5]


def weights_of(loss_type: Any, mask: torch.Tensor, micro_steps: int = 1) -> torch.Tensor:
    return token_weights(
        LOSSES[loss_type].normaliser,
        mask,
        micro_steps=micro_steps,
        rollout_tokens=7,
        steps_per_generation=micro_steps,
        num_processes=1,
        max_completion_length=8,
    )


def _golden(settings: dict[str, Any], sampled: bool = True) -> tuple[float, list[float], TokenLosses]:
    """Loss and gradient of the golden tensors; what TRL does without vLLM is `sampled=False`."""
    config, mask = AlgorithmConfig(**settings), torch.tensor(MASK)
    logprobs = torch.tensor(LOGPROBS, requires_grad=True)
    share = config.top_entropy_quantile
    losses = token_losses(
        logprobs,
        torch.tensor(OLD),
        mask,
        torch.tensor(ADVANTAGES),
        config,
        sampling_logprobs=torch.tensor(SAMPLING) if sampled else None,
        ref_logprobs=torch.tensor(REFERENCE) if config.beta > 0 else None,
        keep=top_entropy_mask(torch.tensor(ENTROPY), mask, share) if share < 1 else None,
    )
    loss = (weights_of(config.loss_type, mask) * losses.loss).sum()
    loss.backward()
    assert logprobs.grad is not None
    return loss.item(), logprobs.grad.flatten().tolist(), losses


def _mean(values: torch.Tensor) -> float:
    mask = torch.tensor(MASK)
    return float((values * mask).sum() / mask.sum())


GRPO = [0, -0.102341, -0.131409, 0, 0.068228, 0.112488, 0.075403, 0]
DAPO = [0, -0.116962, -0.150182, 0, 0.058481, 0.096418, 0.064631, 0]
DR_GRPO = [0, -0.051171, -0.065704, 0, 0.025585, 0.042183, 0.028276, 0]
GSPO = [0, 0, 0, 0, 0.083333, 0.083333, 0.083333, 0]
CORRECTED_KL = [0.000771, -0.117429, -0.14898, 0.002082, 0.058949, 0.09719, 0.062563, 0]
PLAIN_KL = [0.000544, -0.117563, -0.149146, 0.001036, 0.059025, 0.096962, 0.061821, 0]
CISPO = [-0.185714, -0.116962, -0.150182, -0.185714, 0.058481, 0.092857, 0.064631, 0]
CISPO_SEQUENCE = [-0.172319, -0.172319, -0.172319, -0.172319, 0.071429, 0.071429, 0.071429, 0]
SAPO = [-0.163673, -0.101505, -0.131323, -0.193233, 0.067613, 0.108777, 0.075215, 0]
SAPO_SEQUENCE = [-0.149187, -0.149187, -0.149187, -0.149187, 0.083333, 0.083333, 0.083333, 0]
LUSPO = [0, 0, 0, 0, 0.25, 0.25, 0.25, 0]
LUSPO_KL = [0.002582, -0.002251, 0.004659, 0.004659, 0.25258, 0.25258, 0.24084, 0]
VESPO = [-0.02244, -0.02244, -0.02244, -0.02244, 0.071429, 0.071429, 0.071429, 0]
DROPPED = [0, -0.116962, -0.150182, 0, 0, 0, 0, 0]

PLAIN = [
    ("grpo", {}, -0.277631, GRPO),
    ("bnpo", {}, -0.390470, DAPO),
    ("dapo", {}, -0.390470, DAPO),
    ("dr_grpo", {}, -0.170830, DR_GRPO),
    ("dapo", {"epsilon_high": 0.28}, -0.413327, DAPO),
    ("grpo", {"importance_sampling_level": "sequence"}, -0.350000, GSPO),
    ("dapo", {"beta": 0.04}, -0.389566, CORRECTED_KL),
    ("dapo", {"beta": 0.04, "use_bias_correction_kl": False}, -0.389619, PLAIN_KL),
    ("cispo", {"epsilon_high": 1.3}, 0.484366, CISPO),
    ("cispo", {"epsilon_high": 1.3, "importance_sampling_level": "sequence"}, 0.503560, CISPO_SEQUENCE),
    ("sapo", {}, -0.642407, SAPO),
    ("sapo", {"importance_sampling_level": "sequence"}, -0.626561, SAPO_SEQUENCE),
    ("luspo", {"importance_sampling_level": "sequence"}, -1.65, LUSPO),
    ("luspo", {"importance_sampling_level": "sequence", "beta": 0.04}, -1.646825, LUSPO_KL),
    ("vespo", {"vllm_importance_sampling_mode": "token_mask"}, -0.095954, VESPO),
    ("dapo", {"delta": 1.3}, -0.394031, [0, -0.116962, -0.150182, 0, 0.058481, 0, 0.064631, 0]),
    ("grpo", {"delta": 1.21}, -0.289286, [0, -0.102341, -0.131409, 0, 0.068228, 0, 0.075403, 0]),
    ("dapo", {"off_policy_mask_threshold": 0.05}, -0.390470, DAPO),
    ("dapo", {"top_entropy_quantile": 0.4}, -0.223759, [0, -0.116962, 0, 0, 0, 0, 0.064631, 0]),
]

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_a_loss_is_entered_wherever_one_has_to_be(loss_type: LossType) -> None:
    assert loss_type in LOSSES, "enter it in LOSSES, grpo_core/config/losses.py"
    rows = re.findall(r"^\| .*", (ROOT / "docs/reference/algorithm.md").read_text(), re.MULTILINE)
    of_loss = [row for row in rows if f"`{loss_type}`" in row.split(" | ")[0]]
    metrics = (ROOT / "docs/reference/metrics.md").read_text()
    missing = {
        "its plain form: PLAIN_LOSSES, tests/grpo_core/algorithm/plain_losses.py": loss_type not in PLAIN_LOSSES,
        "an independent implementation's numbers: PLAIN, in this file": loss_type not in [name for name, *_ in PLAIN],
        "formula and weight: both tables of losses in docs/reference/algorithm.md": len(of_loss) != 2,
        "its source, in one of these rows": LOSSES[loss_type].source not in "".join(of_loss),
        "its metrics: docs/reference/metrics.md": any(
            f"`{name}`" not in metrics for name in getattr(PLAIN_LOSSES.get(loss_type), "metrics", ())
        ),
    }
    assert not any(missing.values()), "\n".join(place for place, is_missing in missing.items() if is_missing)


@pytest.mark.parametrize(("loss_type", "settings", "loss", "gradient"), PLAIN)
def test_loss_and_gradient_are_those_of_trl(
    loss_type: str, settings: dict[str, Any], loss: float, gradient: list[float]
) -> None:
    value, grad, _ = _golden({"loss_type": loss_type, **settings}, sampled=False)
    assert value == pytest.approx(loss, abs=2e-6)
    assert grad == pytest.approx(gradient, abs=2e-6)


VESPO_TRUNCATED = [-0.009466, -0.009466, -0.009466, -0.009466, 0.023939, 0.023939, 0.023939, 0]
VESPO_MASKED = [-0.454763, -0.454763, -0.454763, -0.454763, 0.169954, 0.169954, 0.169954, 0]
TOKEN_TRUNCATE = [0, -0.15205, -0.129262, 0, 0.049709, 0.087243, 0.054937, 0]
TOKEN_MASK = [0, 0, -0.129262, 0, 0, 0.087243, 0, 0]
SEQUENCE_TRUNCATE = [0, -0.140354, -0.180218, 0, 0.035088, 0.057851, 0.038779, 0]
SEQUENCE_MASK_MAX = [0, 0, 0, 0, 0.029041, 0.04788, 0.032095, 0]
SEQUENCE_MASK_MIN = [0, -0.150182, -0.192837, 0, 0, 0, 0, 0]
EVERYTHING = [0.000675, -0.138556, 0.001051, 0.001822, 0.000546, 0.0009, -0.002413, 0]


@pytest.mark.parametrize(
    ("mode", "high", "low", "settings", "loss", "gradient"),
    [
        ("token_truncate", 1.3, 0.85, {}, -0.457996, TOKEN_TRUNCATE),
        ("token_mask", 1.3, 0.85, {}, -0.042019, TOKEN_MASK),
        ("sequence_truncate", 1.2, 0.6, {}, -0.600282, SEQUENCE_TRUNCATE),
        ("sequence_mask", 1.2, None, {}, 0.109016, SEQUENCE_MASK_MAX),
        ("sequence_mask", 3.0, 0.6, {}, -0.783256, SEQUENCE_MASK_MIN),
        ("token_truncate", 1.3, None, {"loss_type": "vespo"}, -0.024377, VESPO_TRUNCATED),
        (
            "token_mask",
            1.3,
            None,
            {"loss_type": "vespo", "vespo_k_pos": 0.1, "vespo_k_neg": 0.2},
            1.377173,
            VESPO_MASKED,
        ),
        (
            "token_truncate",
            3.0,
            None,
            {"loss_type": "grpo", "beta": 0.04, "off_policy_mask_threshold": 0.2, "top_entropy_quantile": 0.4},
            -0.339678,
            EVERYTHING,
        ),
    ],
)
def test_loss_and_gradient_corrected_for_the_sampling_engine_are_those_of_trl(
    mode: str, high: float, low: float | None, settings: dict[str, Any], loss: float, gradient: list[float]
) -> None:
    bounds = {"vllm_importance_sampling_clip_max": high, "vllm_importance_sampling_clip_min": low}
    value, grad, _ = _golden({"vllm_importance_sampling_mode": mode, **bounds, **settings})
    assert value == pytest.approx(loss, abs=2e-6)
    assert grad == pytest.approx(gradient, abs=2e-6)


# By IWOPDTrainer._compute_iw_opd_loss of TRL 1.16 (experimental) at gamma 0 and temperature 1: the gradient of the sum
# over the 7 valid tokens, divided by 7, and its metric mean_advantage; with and without log-probabilities of a rollout.
IW_OPD = [0.014286, -0.014286, 0.028571, 0.028571, 0.014286, 0.014286, -0.057143, 0]
IW_OPD_OLD = [-0.028571, 0.014286, 0.021429, -0.057143, 0.042857, -0.028571, -0.042857, 0]


@pytest.mark.parametrize(
    ("old", "gradient", "mean"), [(LOGPROBS, IW_OPD, -0.02857142857), (OLD, IW_OPD_OLD, 0.07857142857)]
)
@pytest.mark.parametrize("loss_type", ["dapo", "cispo"])
def test_a_teacher_alone_has_the_advantages_and_the_on_policy_gradient_of_trls_iw_opd(
    loss_type: Any, old: list[list[float]], gradient: list[float], mean: float
) -> None:
    mask, logprobs = torch.tensor(MASK), torch.tensor(LOGPROBS, requires_grad=True)
    advantages = teacher_advantages(torch.zeros(2), torch.tensor(old), torch.tensor(REFERENCE), 1.0)
    assert (-advantages * mask / 7).flatten().tolist() == pytest.approx(gradient, abs=1e-6)
    assert _mean(advantages) == pytest.approx(mean, abs=1e-6)
    if old is LOGPROBS:
        config = AlgorithmConfig(loss_type=loss_type, epsilon_high=5.0)
        losses = token_losses(logprobs, logprobs.detach(), mask, advantages, config)
        (weights_of(loss_type, mask) * losses.loss).sum().backward()
        assert logprobs.grad is not None
        assert logprobs.grad.flatten().tolist() == pytest.approx(gradient, abs=1e-6)


@pytest.mark.parametrize(("threshold", "loss", "gradient"), [(0.2, -0.61, DROPPED), (0.3, -0.390470, DAPO)])
def test_the_off_policy_mask_measures_drift_from_the_sampling_engine_as_trl_does(
    threshold: float, loss: float, gradient: list[float]
) -> None:
    settings = {"off_policy_mask_threshold": threshold, "vllm_importance_sampling_correction": False}
    value, grad, losses = _golden(settings)
    assert value == pytest.approx(loss, abs=2e-6)
    assert grad == pytest.approx(gradient, abs=2e-6)
    assert losses.correction is None
    assert _mean(losses.metrics["off_policy_mask/kept"]) == pytest.approx(4 / 7 if threshold == 0.2 else 1)


def test_a_completion_that_has_drifted_just_to_the_threshold_is_kept() -> None:
    config = AlgorithmConfig(off_policy_mask_threshold=0.25)
    rows = torch.full((1, 2), -1.5), torch.full((1, 2), -1.25), torch.ones(1, 2)
    kept = token_losses(*rows, torch.tensor([-1.0]), config).metrics["off_policy_mask/kept"]
    assert kept.tolist() == [[1.0, 1.0]]


@pytest.mark.parametrize(
    ("settings", "metric", "value"),
    [
        ({"beta": 0.04}, "kl", 0.022594),
        ({"beta": 0.04, "use_bias_correction_kl": False}, "kl", 0.021281),
        ({}, "clip_ratio/low_mean", 0),
        ({}, "clip_ratio/high_mean", 2 / 7),
        ({}, "clip_ratio/region_mean", 2 / 7),
        ({"loss_type": "luspo", "importance_sampling_level": "sequence"}, "clip_ratio/high_mean", 4 / 7),
        ({"loss_type": "cispo", "epsilon_high": 1.3}, "cispo_clip_ratio", 2 / 7),
    ],
)
def test_metrics_are_means_over_tokens(settings: dict[str, Any], metric: str, value: float) -> None:
    assert _mean(_golden(settings, sampled=False)[2].metrics[metric]) == pytest.approx(value, abs=1e-6)


def test_vespo_reports_its_weight_of_each_completion() -> None:
    settings = {"loss_type": "vespo", "vllm_importance_sampling_mode": "token_mask"}
    weight = _golden(settings, sampled=False)[2].metrics["vespo/phi_seq_mean"]
    assert weight[0].tolist() == pytest.approx([0.157080] * 4, abs=1e-6)
    assert weight[1, :3].tolist() == pytest.approx([1.0] * 3, abs=1e-6)


def test_each_loss_type_reports_the_metrics_that_it_has_and_none_that_carries_a_gradient() -> None:
    shared = {"kl", "sampling/importance_sampling_ratio/mean", "off_policy_mask/kept"}
    for loss_type in LOSS_TYPES:
        loss = plain(loss_type)
        options = {"loss_type": loss_type, **loss.needs}
        assert _golden(options, sampled=False)[2].metrics.keys() == loss.metrics
        full = _golden({**options, "beta": 0.1, "off_policy_mask_threshold": 1.0})[2]
        assert full.metrics.keys() == loss.metrics | shared
        assert full.correction is not None
        assert full.correction.equal(full.metrics["sampling/importance_sampling_ratio/mean"])
        for values in (*full.metrics.values(), full.correction):
            assert values.shape == full.loss.shape == (2, 4)
            assert not values.requires_grad
