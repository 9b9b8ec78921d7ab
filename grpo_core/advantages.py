"""Rewards → advantages: each completion against the others of its group (DeepSeekMath, arXiv:2402.03300)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

STD_EPSILON = 1e-4
ROUNDING = 1e-12  # relative; rewards closer than this are equal, summed in another order


@dataclass(frozen=True)
class Advantages:
    """`advantages` and `rewards` (the weighted sums, NaN where unscorable): (B,); `group_std`: (P,), 0 = no signal."""

    advantages: Tensor
    rewards: Tensor
    group_std: Tensor


def group_advantages(
    reward_matrix: Tensor,  # (B, K), NaN where a function gave None; groups lie in a row
    weights: Tensor,  # (K,)
    num_generations: int,
    scale_rewards: Literal["group", "batch", "none"] = "group",
) -> Advantages:
    """A_i = (r_i − mean_group) / (σ + 1e-4), r_i = Σ_k w_k R_ik over the rewards that are not NaN.

    σ is the sample standard deviation (ddof 1) of the group or of the whole batch; `none` leaves the division out
    (Dr. GRPO, arXiv:2503.20783). A completion that no function scored stays out of the statistics and gets 0.
    """
    matrix = reward_matrix.double()
    scored = ~matrix.isnan().all(dim=1)  # (B,)
    rewards = (matrix.nan_to_num(0.0) * weights.double()).sum(dim=1)
    rewards = torch.where(scored, rewards, torch.nan)
    groups = rewards.view(-1, num_generations)  # (P, G)
    mean = groups.nanmean(dim=1, keepdim=True)
    group_std = torch.stack([sample_std(group) for group in groups])
    if scale_rewards == "group":
        scale = group_std[:, None] + STD_EPSILON
    elif scale_rewards == "batch":
        scale = sample_std(rewards) + STD_EPSILON
    else:
        scale = torch.ones(())
    differences = torch.where(group_std[:, None] == 0, 0.0, groups - mean)
    advantages = (differences / scale).view(-1).nan_to_num(0.0)
    return Advantages(advantages.float(), rewards.float(), group_std.float())


def sample_std(values: Tensor) -> Tensor:
    """Standard deviation (ddof 1) of the entries that are not NaN; 0 when they are equal but for rounding, or one."""
    values = values[~values.isnan()]
    if len(values) < 2 or values.max() - values.min() <= ROUNDING * values.abs().max():
        return values.new_zeros(())
    return values.std()
