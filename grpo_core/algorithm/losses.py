"""Log-probabilities and advantages → per-token losses and the weights that turn them into one scalar.

loss = Σ_it weight_it · L_it. The weights carry the whole normalisation of a loss and follow from the masks alone,
so that an update may be cut into micro-batches in any way without changing its gradient.

Shapes: B completions, T tokens. ρ is (B, T), or (B, 1) at sequence level, written "B #T"; A is (B, 1), or (B, T) with a
teacher; m is the completion mask (B, T).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, assert_never

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from grpo_core.config.algorithm import AlgorithmConfig
from grpo_core.config.losses import LOSSES, Normaliser

VESPO_MAX_LOG_RATIO = 20.0  # of a token and of a sequence
VESPO_MIN_LOG_RATIO = math.log(1e-8)  # of a sequence and of a token's sampling correction
VESPO_MIN_LAMBDA = 1e-4

ENTROPY_ROUNDING = 1e-5  # nats by which entropies of the same distribution may differ in float32


@dataclass(frozen=True)
class TokenLosses:
    """Per-token quantities; meaningful where the completion mask is 1."""

    loss: Float[Tensor, "B T"]  # with beta·KL
    metrics: dict[str, Float[Tensor, "B T"]]  # detached; to be logged as means over tokens
    correction: Float[Tensor, "B T"] | None  # detached; the sampling correction


def token_losses(
    logprobs: Float[Tensor, "B T"],
    old_logprobs: Float[Tensor, "B T"],
    mask: Float[Tensor, "B T"],  # 1 on completion tokens
    advantages: Float[Tensor, " B"] | Float[Tensor, "B T"],  # per token with a teacher, see `teacher_advantages`
    config: AlgorithmConfig,
    *,
    sampling_logprobs: Float[Tensor, "B T"] | None = None,  # as the rollout engine has them
    ref_logprobs: Float[Tensor, "B T"] | None = None,
    keep: Float[Tensor, "B T"] | None = None,  # 0 where a token's policy term is left out
) -> TokenLosses:
    """L = policy term of the loss type · off-policy mask · keep · sampling correction + β·KL.

    The ratio ρ = π/π_old compares the policy with the one before the first update of the rollout; the sampling
    correction compares that one with the engine that drew the tokens. vespo has the correction in its own weight.
    Masks and correction do not change the KL.
    """
    log_ratio = (logprobs - old_logprobs) * mask
    per_token = advantages.ndim == 2
    ratio = importance_ratio(log_ratio, mask, config.importance_sampling_level, per_token=per_token)
    advantage = advantages if per_token else advantages[:, None]
    metrics: dict[str, Tensor] = {}
    correction = factor = None
    if sampling_logprobs is not None and config.vllm_importance_sampling_correction:
        correction = factor = sampling_correction(old_logprobs, sampling_logprobs, mask, config)
        metrics["sampling/importance_sampling_ratio/mean"] = correction

    term = LOSSES[config.loss_type].term
    match term:
        case "cispo":
            loss = cispo_loss(logprobs, ratio, advantage, config.upper_clip)
            metrics["cispo_clip_ratio"] = (ratio > config.upper_clip) & (advantage > 0)
        case "sapo":
            loss = sapo_loss(ratio, advantage, config.sapo_temperature_pos, config.sapo_temperature_neg)
        case "vespo":
            weight = vespo_weight(log_ratio, mask, advantage, correction, config)
            factor = None  # the weight holds the correction
            loss = -weight * advantage * logprobs
            metrics["vespo/phi_seq_mean"] = weight
        case "clipped":
            loss = clipped_loss(ratio, advantage, config.epsilon, config.upper_clip, config.delta)
            low = (ratio < 1 - config.epsilon) & (advantage < 0)
            high = (ratio > 1 + config.upper_clip) & (advantage > 0)
            metrics |= {"clip_ratio/low_mean": low, "clip_ratio/high_mean": high, "clip_ratio/region_mean": low | high}
        case _:
            assert_never(term)

    if config.off_policy_mask_threshold is not None:
        sampled = old_logprobs if sampling_logprobs is None else sampling_logprobs
        on_policy = off_policy_mask(logprobs, sampled, mask, advantage, config.off_policy_mask_threshold)
        loss = loss * on_policy
        metrics["off_policy_mask/kept"] = on_policy
    if keep is not None:
        loss = loss * keep
    if factor is not None:
        loss = loss * factor
    if ref_logprobs is not None:
        kl = kl_to_reference(logprobs, ref_logprobs, mask, ratio if config.use_bias_correction_kl else None)
        loss = loss + config.beta * kl
        metrics["kl"] = kl
    return TokenLosses(
        loss=loss.expand_as(logprobs),
        metrics={key: value.detach().to(logprobs.dtype).expand_as(logprobs) for key, value in metrics.items()},
        correction=None if correction is None else correction.expand_as(logprobs),
    )


def importance_ratio(
    log_ratio: Float[Tensor, "B T"], mask: Float[Tensor, "B T"], level: Literal["token", "sequence"], *, per_token: bool
) -> Float[Tensor, " B #T"]:
    """ρ = exp(logp − logp_old): of each token, or the geometric mean over the completion's tokens.

    `log_ratio` is 0 outside the mask. The sequence level is GSPO's (arXiv:2507.18071). `per_token`: advantages differ
    from token to token; the ratio of a sequence then has each token's own gradient (GSPO-token there), since with that
    of the mean, all tokens would learn the mean advantage.
    """
    if level == "token":
        return log_ratio.exp()
    mean = log_ratio.sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1)
    return (mean.detach() + log_ratio - log_ratio.detach() if per_token else mean).exp()


def clipped_loss(
    ratio: Float[Tensor, " B #T"],
    advantage: Float[Tensor, " B #T"],
    epsilon: float,
    epsilon_high: float,
    delta: float | None = None,
) -> Float[Tensor, " B #T"]:
    """L = −min(min(ρ, δ)·A, clip(ρ, 1 − ε, 1 + ε_high)·A): PPO-clip as in GRPO (arXiv:2402.03300).

    ε_high > ε is DAPO's clip-higher (arXiv:2503.14476). δ bounds the term where A < 0, which the clip leaves free
    (INTELLECT-2, arXiv:2505.07291). Losses with this term differ in `token_weights` alone.
    """
    clipped = ratio.clamp(1 - epsilon, 1 + epsilon_high) * advantage
    if delta is not None:
        ratio = ratio.clamp(max=delta)
    return -torch.minimum(ratio * advantage, clipped)


def cispo_loss(
    logprobs: Float[Tensor, "B T"], ratio: Float[Tensor, " B #T"], advantage: Float[Tensor, " B #T"], bound: float
) -> Float[Tensor, "B T"]:
    """L = −sg[min(ρ, ε_high)]·A·logp: every token keeps a gradient (MiniMax-M1, arXiv:2506.13585)."""
    return -ratio.detach().clamp(max=bound) * advantage * logprobs


def sapo_loss(
    ratio: Float[Tensor, " B #T"], advantage: Float[Tensor, " B #T"], temperature_pos: float, temperature_neg: float
) -> Float[Tensor, " B #T"]:
    """L = −sigmoid(τ(ρ − 1))·4/τ·A; τ follows the sign of A (SAPO, arXiv:2511.20347).

    Where ρ = 1 the gradient is that of ρ·A; it fades smoothly on both sides instead of being clipped.
    """
    temperature = torch.where(advantage > 0, temperature_pos, temperature_neg)
    return -torch.sigmoid(temperature * (ratio - 1)) * 4 / temperature * advantage


@torch.no_grad()
def vespo_weight(
    log_ratio: Float[Tensor, "B T"],
    mask: Float[Tensor, "B T"],
    advantage: Float[Tensor, " B #T"],
    correction: Float[Tensor, " B #T"] | None,
    config: AlgorithmConfig,
) -> Float[Tensor, " B #T"]:
    """φ(w) = w^k · exp(λ(1 − w)), with one (k, λ) for A ≥ 0 and one for A < 0 (VESPO, arXiv:2602.10693).

    w = Π_t ρ_t · correction_t is the weight of the whole completion against the engine that sampled it. The loss is
    −sg[φ]·A·logp. Logarithms are clamped, so that a token whose correction is 0 multiplies w by 1e-8.
    """
    terms = log_ratio.clamp(-VESPO_MAX_LOG_RATIO, VESPO_MAX_LOG_RATIO)
    if correction is not None:
        terms = terms + correction.log().clamp(VESPO_MIN_LOG_RATIO, VESPO_MAX_LOG_RATIO)
    log_w = (terms * mask).sum(dim=1, keepdim=True).clamp(VESPO_MIN_LOG_RATIO, VESPO_MAX_LOG_RATIO)
    k = torch.where(advantage >= 0, config.vespo_k_pos, config.vespo_k_neg)
    decay = torch.where(advantage >= 0, config.vespo_lambda_pos, config.vespo_lambda_neg).clamp(min=VESPO_MIN_LAMBDA)
    return (decay + k * log_w - decay * log_w.exp()).exp()


@torch.no_grad()
def sampling_correction(
    old_logprobs: Float[Tensor, "B T"],
    sampling_logprobs: Float[Tensor, "B T"],
    mask: Float[Tensor, "B T"],
    config: AlgorithmConfig,
) -> Float[Tensor, " B #T"]:
    """exp(logp_old − logp_sampling) of each token, or of the completion's sum in the sequence modes.

    Outside [clip_min, clip_max] it is clamped (truncate) or 0 (mask). Outside the completion mask the difference is 0.
    """
    difference = (old_logprobs - sampling_logprobs) * mask
    if config.vllm_importance_sampling_mode.startswith("sequence"):
        difference = difference.sum(dim=1, keepdim=True)
    ratio = difference.exp()
    low, high = config.vllm_importance_sampling_clip_min or 0.0, config.vllm_importance_sampling_clip_max
    if config.vllm_importance_sampling_mode.endswith("truncate"):
        return ratio.clamp(low, high)
    return ratio.masked_fill((ratio < low) | (ratio > high), 0.0)


@torch.no_grad()
def off_policy_mask(
    logprobs: Float[Tensor, "B T"],
    sampling_logprobs: Float[Tensor, "B T"],
    mask: Float[Tensor, "B T"],
    advantage: Float[Tensor, " B #T"],
    threshold: float,
) -> Float[Tensor, " B #T"]:
    """1 where A ≥ 0 or mean_t(logp_sampling − logp) ≤ threshold, else 0 (DeepSeek-V3.2, arXiv:2512.02556)."""
    drift = ((sampling_logprobs - logprobs) * mask).sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(1)
    return ((advantage >= 0) | (drift <= threshold)).to(logprobs.dtype)


def kl_to_reference(
    logprobs: Float[Tensor, "B T"],
    ref_logprobs: Float[Tensor, "B T"],
    mask: Float[Tensor, "B T"],
    ratio: Float[Tensor, " B #T"] | None,
) -> Float[Tensor, "B T"]:
    """KL estimate k3 = exp(d) − d − 1, d = logp_ref − logp; 0 outside the mask.

    Times ρ, where given, its gradient is unbiased off-policy too (DeepSeek-V3.2, arXiv:2512.02556).
    """
    difference = (ref_logprobs - logprobs) * mask
    kl = difference.exp() - difference - 1
    return kl if ratio is None else kl * ratio


def top_entropy_mask(entropy: Float[Tensor, "B T"], mask: Float[Tensor, "B T"], share: float) -> Float[Tensor, "B T"]:
    """1 on the valid tokens whose entropy is at least the (1 − share) quantile of all valid tokens'.

    Beyond the 80/20 Rule (arXiv:2506.01939): the tokens at which a completion forks carry the learning. The quantile
    is interpolated linearly; ties with it are kept. Entropies that are equal except for rounding count as ties:
    completions of a group begin with the same distribution, but a pass of another size rounds it differently.
    """
    valid = mask > 0
    if not valid.any():
        return torch.zeros_like(mask)
    # torch.quantile refuses more than 2^24 values; ranks of that many need float64.
    threshold = float(np.quantile(entropy[valid].double().cpu().numpy(), 1 - share))
    return (valid & (entropy >= threshold - ENTROPY_ROUNDING)).to(mask.dtype)


def token_weights(
    normaliser: Normaliser,
    mask: Float[Tensor, "B T"],  # the rows that the plan has for one process in one micro-step
    *,
    micro_steps: int,
    rollout_tokens: int,
    steps_per_generation: int,
    num_processes: int,
    max_completion_length: int,
) -> Float[Tensor, "B T"]:
    """Weight of each token's loss in the process's scalar; the gradient is then averaged over the processes.

    completion              1 / (length of the completion · B · micro-steps in the update)
    micro-step              1 / (valid tokens of the micro-step · micro-steps)
    max_completion_length   1 / (B · max_completion_length · micro-steps)
    generation batch        1 / (mean tokens of the generation batch per process and micro-step · micro-steps)
    number of completions   1 / (B · micro-steps)
    """
    rows = mask.shape[0]
    match normaliser:
        case "completion":
            denominator = mask.sum(dim=1, keepdim=True).clamp(min=1) * rows * micro_steps
        case "micro-step":
            denominator = mask.sum().clamp(min=1) * micro_steps
        case "max_completion_length":
            denominator = torch.tensor(rows * max_completion_length * micro_steps)
        case "generation batch":
            denominator = torch.tensor(rollout_tokens / num_processes * micro_steps / steps_per_generation)
        case "number of completions":
            denominator = torch.tensor(rows * micro_steps)
        case _:
            assert_never(normaliser)
    return mask / denominator.to(mask.device)
