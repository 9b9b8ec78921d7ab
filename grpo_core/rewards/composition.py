"""Combine the values of the rewards into the one that the policy is trained on: clip, normalise, gate, weigh, sum.

Every step looks at one completion alone, so that training, evaluation and a recorded row agree on its value.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from grpo_core.config.inputs import RewardConfig
from grpo_core.config.run import RunConfig
from grpo_core.errors import ConfigError
from grpo_core.rewards.builtin.record import Range
from grpo_core.rewards.contract import range_of


def counted(given: np.ndarray, rewards: Sequence[RewardConfig]) -> np.ndarray:
    """The values of K rewards for N completions as they count, before the weights. (N, K)

    given: the values that the functions gave, NaN for None, which stays NaN. (N, K) With `clip` = [l, h], a value v
    counts as min(max(v, l), h); with `normalize`, as (that − l) / (h − l). With `gate`, it counts as 0 where the reward
    named there gave less than `gate_threshold`, or None (the conditioned reward of GDPO, arXiv:2601.05242); the gate
    looks at the value that this reward gave, not at what it counts.
    """
    place = {reward.name: k for k, reward in enumerate(rewards)}
    columns = []
    for values, reward in zip(given.T, rewards, strict=True):
        values = _scaled(values, reward)
        if reward.gate is not None:
            is_closed = ~(given[:, place[reward.gate]] >= reward.gate_threshold)
            values = np.where(is_closed & ~np.isnan(values), 0.0, values)
        columns.append(values)
    return np.stack(columns, axis=1)


def _scaled(values: np.ndarray, reward: RewardConfig) -> np.ndarray:
    """The values with the reward's `clip` and `normalize`."""
    if not reward.clip:
        return values
    low, high = reward.clip
    values = np.clip(values, low, high)
    return (values - low) / (high - low) if reward.normalize else values


def weighted_sum(given: np.ndarray, rewards: Sequence[RewardConfig]) -> np.ndarray:
    """r_i = Σ_k weight_k · counted_ik over the values that are not NaN; NaN if all are. given: (N, K); sums: (N,)."""
    terms = counted(given, rewards) * np.array([reward.weight for reward in rewards])
    return np.where(np.isnan(terms).all(axis=1), np.nan, np.nansum(terms, axis=1))


def passed(given: np.ndarray, config: RunConfig, sources: Sequence[str | None]) -> np.ndarray:
    """Degree to which each completion passes, from 0 to 1: the value of its source's accuracy reward, scaled by its
    range; NaN if it is not scored, or the range not known. (N,) given: as `counted` takes it (N, K); sources: of each
    completion (N,)."""
    judges, names = config.accuracy_reward, [reward.name for reward in config.rewards]
    judge = np.array([judges if isinstance(judges, str) else judges[source or ""] for source in sources], object)
    found = np.full(len(given), np.nan)
    for name, (low, high) in _ranges(config).items():
        if math.isfinite(high - low):
            rows = judge == name
            found[rows] = (given[rows, names.index(name)] - low) / (high - low)
    return found


def has_pass_rates(config: RunConfig) -> bool:
    """True if `passed` is known for any source."""
    return any(math.isfinite(high - low) for low, high in _ranges(config).values())


def without_range(config: RunConfig) -> list[str]:
    """Names of the accuracy rewards whose range is not known, so that `passed` is not either."""
    return [name for name, (low, high) in _ranges(config).items() if not math.isfinite(high - low)]


def check_curriculum(config: RunConfig) -> None:
    """Raises ConfigError if `data.curriculum` needs pass rates and there can be none."""
    keys = config.data.curriculum
    unknown = [repr(name) for name in without_range(config)]
    if not unknown or (keys.kind == "none" and not keys.probe):
        return
    asked = f"data.curriculum.kind={keys.kind!r}" if keys.kind != "none" else f"data.curriculum.probe={keys.probe}"
    raise ConfigError(
        f"{asked} goes by pass rates, the values of the reward {' and '.join(unknown)} scaled to its range, which is "
        "not known: give this reward its range = [lowest, highest], or name another one in evaluation.accuracy_reward"
    )


def _ranges(config: RunConfig) -> dict[str, Range]:
    """Lowest and highest value of each accuracy reward; infinite if not known."""
    of_name = {reward.name: reward for reward in config.rewards}
    return {name: range_of(of_name[name]) or (-math.inf, math.inf) for name in config.accuracy_rewards}


def range_of_sum(rewards: Sequence[RewardConfig]) -> Range:
    """Lowest and highest value of `weighted_sum`; infinite if a reward's range is not known.

    A reward can count as 0 if it is gated or one of several.
    """
    lows, highs = zip(*(_range_of_term(reward, can_be_absent=len(rewards) > 1) for reward in rewards), strict=True)
    return sum(lows), sum(highs)


def _range_of_term(reward: RewardConfig, can_be_absent: bool) -> Range:
    ends = _scaled(np.array(range_of(reward) or (-math.inf, math.inf)), reward)
    terms = [reward.weight * float(end) for end in ends] if reward.weight else [0.0]
    if can_be_absent or reward.gate is not None:
        terms.append(0.0)
    return min(terms), max(terms)
