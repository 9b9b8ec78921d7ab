"""Log-probabilities and advantages → per-token losses and the weights that turn them into one scalar.

loss = Σ_it weight_it · L_it. The weights carry the whole normalisation of a loss type and follow from the masks alone,
so that an update may be cut into micro-batches in any way without changing its gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

LossType = Literal["grpo", "bnpo", "dr_grpo", "dapo"]


@dataclass(frozen=True)
class TokenLosses:
    """Per-token quantities, all (B, T); meaningful where the completion mask is 1."""

    loss: Tensor
    ratio: Tensor  # (B, T), or (B, 1) at sequence level
    clipped_low: Tensor  # bool
    clipped_high: Tensor  # bool
    kl: Tensor | None


def token_losses(
    logprobs: Tensor,  # (B, T)
    old_logprobs: Tensor,  # (B, T)
    mask: Tensor,  # (B, T), 1 on completion tokens
    advantages: Tensor,  # (B,)
    *,
    epsilon: float,
    epsilon_high: float,
    importance_sampling_level: Literal["token", "sequence"] = "token",
    ref_logprobs: Tensor | None = None,  # (B, T)
    beta: float = 0.0,
    use_bias_correction_kl: bool = True,
) -> TokenLosses:
    """L = −min(ρ·A, clip(ρ, 1 − ε, 1 + ε_high)·A) + β·KL (PPO-clip in GRPO's form, arXiv:2402.03300).

    ρ = exp(logp − logp_old) per token, or at sequence level exp(mean_t(logp − logp_old)) (GSPO, arXiv:2507.18071).
    ε_high > ε is DAPO's clip-higher (arXiv:2503.14476). KL is the k3 estimator exp(r) − r − 1, r = logp_ref − logp,
    times ρ when bias-corrected (DeepSeek-V3.2, arXiv:2512.02556).
    """
    log_ratio = (logprobs - old_logprobs) * mask
    if importance_sampling_level == "sequence":
        log_ratio = log_ratio.sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1)
    ratio = log_ratio.exp()
    advantage = advantages[:, None]
    unclipped = ratio * advantage
    clipped = ratio.clamp(1 - epsilon, 1 + epsilon_high) * advantage
    loss = -torch.minimum(unclipped, clipped).expand_as(logprobs)
    kl = None
    if ref_logprobs is not None:
        ref_ratio = (ref_logprobs - logprobs) * mask
        kl = ref_ratio.exp() - ref_ratio - 1
        if use_bias_correction_kl:
            kl = kl * ratio
        loss = loss + beta * kl
    return TokenLosses(
        loss=loss,
        ratio=ratio.detach(),
        clipped_low=((ratio < 1 - epsilon) & (advantage < 0)).expand_as(logprobs),
        clipped_high=((ratio > 1 + epsilon_high) & (advantage > 0)).expand_as(logprobs),
        kl=None if kl is None else kl.detach(),
    )


def token_weights(
    loss_type: LossType,
    mask: Tensor,  # (B, T), the rows of one process's micro-step
    *,
    micro_steps: int,
    rollout_tokens: int,
    steps_per_generation: int,
    num_processes: int,
    max_completion_length: int,
) -> Tensor:
    """Weight of each token's loss in the process's scalar; the gradient is then averaged over the processes. (B, T)

    grpo     1 / (length of the completion · B · micro-steps in the update)
    bnpo     1 / (valid tokens of the micro-step · micro-steps)
    dr_grpo  1 / (B · max_completion_length · micro-steps)               arXiv:2503.20783
    dapo     1 / (mean tokens of the generation batch per process and micro-step · micro-steps)   arXiv:2503.14476
    """
    rows = mask.shape[0]
    match loss_type:
        case "grpo":
            denominator = mask.sum(dim=1, keepdim=True).clamp(min=1) * rows * micro_steps
        case "bnpo":
            denominator = mask.sum().clamp(min=1) * micro_steps
        case "dr_grpo":
            denominator = torch.tensor(rows * max_completion_length * micro_steps)
        case "dapo":
            denominator = torch.tensor(rollout_tokens / num_processes * micro_steps / steps_per_generation)
    return mask / denominator.to(mask.device)
