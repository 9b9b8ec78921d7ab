"""Rewards → advantages: each completion against the others of its group (DeepSeekMath, arXiv:2402.03300); each
token against a teacher."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

STD_EPSILON = 1e-4
ROUNDING = 1e-12  # relative; rewards closer than this are equal, summed in another order


@dataclass(frozen=True)
class Advantages:
    """Advantages of B completions: P groups of G, one after the other."""

    advantages: Float[Tensor, " B"]
    rewards: Float[Tensor, " B"]  # the weighted sums, NaN where unscorable
    group_std: Float[Tensor, " P"]  # 0: no signal


def group_advantages(
    reward_matrix: Float[Tensor, "B K"],  # NaN where a function gave None; groups lie in a row
    weights: Float[Tensor, " K"],
    num_generations: int,
    scale_rewards: Literal["group", "batch", "none"] = "group",
    *,
    aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = "sum_then_normalize",
    estimator: Literal["grpo", "rloo"] = "grpo",
) -> Advantages:
    """A_i = (r_i − baseline_i) / (σ + 1e-4), r_i = Σ_k w_k R_ik over the rewards that are not NaN.

    The baseline is the group's mean (`grpo`) or the mean of the group's other rewards (`rloo`, arXiv:2402.14740). σ is
    the sample standard deviation (ddof 1) of the group or of the whole batch; `none` leaves the division out (Dr. GRPO,
    arXiv:2503.20783).

    `normalize_then_sum` (GDPO, arXiv:2601.05242) instead takes z_ik = (R_ik − mean_k) / (σ_k + 1e-4) over the group,
    one reward function at a time, s_i = Σ_k w_k z_ik and A_i = (s_i − mean) / (σ + 1e-4) over the whole batch; it
    leaves no choice of estimator and scale. `group_std` is then that of s.

    A completion that no function scored stays out of the statistics and gets 0; so does a lone scored one of a group.
    """
    matrix = reward_matrix.double().view(-1, num_generations, reward_matrix.shape[1])  # (P, G, K)
    weights = weights.double()
    rewards = _sum_scored(weights * matrix)
    if aggregation == "normalize_then_sum":
        std = sample_std(matrix.mT)[:, None]  # (P, 1, K)
        factors = torch.where(std == 0, 0.0, weights / (std + STD_EPSILON))
        # z sums to 0 in every group, so the batch's mean is 0 except for a rounding error, which would reach groups
        # without signal.
        differences = _sum_scored(factors * (matrix - matrix.nanmean(1, keepdim=True)))
        group_std = sample_std(differences, _sum_scored((factors * matrix).abs()))
        divisor = sample_std(differences.flatten()) + STD_EPSILON
    else:
        sizes = _sum_scored((weights * matrix).abs())
        differences = rewards - rewards.nanmean(1, keepdim=True)
        if estimator == "rloo":
            # r_i − Σ_{j≠i} r_j / (n − 1) = (r_i − mean) · n / (n − 1)
            n = (~rewards.isnan()).sum(1, keepdim=True)
            differences = differences * n / (n - 1).clamp(min=1)
        group_std = sample_std(rewards, sizes)
        if scale_rewards == "group":
            divisor = group_std[:, None] + STD_EPSILON
        elif scale_rewards == "batch":
            divisor = sample_std(rewards.flatten(), sizes.flatten()) + STD_EPSILON
        else:
            divisor = torch.ones(())
    advantages = torch.where(group_std[:, None] == 0, 0.0, differences / divisor).nan_to_num(0.0)
    return Advantages(advantages.flatten().float(), rewards.flatten().float(), group_std.float())


def teacher_advantages(
    advantages: Float[Tensor, " B"],
    old_logprobs: Float[Tensor, "B T"],  # detached
    teacher_logprobs: Float[Tensor, "B T"],
    weight: float,
) -> Float[Tensor, "B T"]:
    """A_it = A_i − λ·(log π_old(y_t) − log π_teacher(y_t)): the bracket, over the policy's own samples, has the mean
    KL(π_old ‖ π_teacher), and its policy gradient is that of the reverse KL (on-policy distillation: GKD,
    arXiv:2306.13649; Thinking Machines, 2025).

    π_old is the distribution that is trained and sampled, over the tokens that truncated sampling leaves; the teacher's
    is over the whole vocabulary, as that of the reference: so the divergence is finite whatever is left out.
    """
    return advantages[:, None] - weight * (old_logprobs - teacher_logprobs)


def _sum_scored(terms: Float[Tensor, "*rows N"]) -> Float[Tensor, "*rows"]:
    """Sum over the last dimension of the values that are not NaN; NaN where all are."""
    return torch.where(terms.isnan().all(-1), torch.nan, terms.nansum(-1))


def sample_std(
    values: Float[Tensor, "*rows N"], sizes: Float[Tensor, "*rows N"] | None = None
) -> Float[Tensor, "*rows"]:
    """Standard deviation (ddof 1) over the last dimension of the entries that are not NaN.

    0 when there is one entry or they are equal up to rounding. That error is relative to the terms that the values
    are sums of; `sizes` gives the sum of their absolute values where terms may cancel.
    """
    missing = values.isnan()
    n = (~missing).sum(-1)
    std = ((values - values.nanmean(-1, keepdim=True)).square().nansum(-1) / (n - 1).clamp(min=1)).sqrt()
    span = values.masked_fill(missing, -torch.inf).amax(-1) - values.masked_fill(missing, torch.inf).amin(-1)
    largest = (values if sizes is None else sizes).abs().masked_fill(missing, 0.0).amax(-1)
    return torch.where(span <= ROUNDING * largest, 0.0, std)
