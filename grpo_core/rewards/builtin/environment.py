"""The environment's own reward."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from grpo_core.config.environment import OWN_REWARD
from grpo_core.rewards.builtin.record import BuiltinReward, Rewards


def environment(environments: Sequence[Any]) -> list[float | None]:
    """The value that each conversation's environment returned from `get_reward`; None if it has no such method."""
    return [each.get_reward() for each in environments]


REWARDS: Rewards = {OWN_REWARD: BuiltinReward(environment, (-math.inf, math.inf), looks_at_text_only=True)}
