"""Rewards for a completion's length, in tokens or characters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from grpo_core.data.chat import text_of
from grpo_core.rewards.builtin.record import BuiltinReward, Rewards


def length(completion_ids: Sequence[Sequence[int]], target: int) -> list[float | None]:
    """1 at `target` tokens (the end token counts), falling linearly to 0 at none and at twice the target."""
    return [max(0.0, 1.0 - abs(len(ids) - target) / target) for ids in completion_ids]


def length_band(completion_ids: Sequence[Sequence[int]], low: int, high: int) -> list[float | None]:
    """1 from `low` to `high` tokens (the end token counts), falling linearly to 0 at none and at twice `high`."""
    if not 0 <= low <= high or high == 0:
        raise ValueError(f"low={low}, high={high}: the band must not be empty, and begin at 0 or above")
    return [len(ids) / low if len(ids) < low else max(0.0, min(1.0, 2.0 - len(ids) / high)) for ids in completion_ids]


def char_length(completions: Sequence[Any], target: int) -> list[float | None]:
    """-|target - characters|, at most 0: the reward of the first example in TRL's documentation, there with 20."""
    return [-abs(float(target - len(text_of(completion)))) for completion in completions]


def soft_overlong_punishment(
    completion_ids: Sequence[Sequence[int]], max_completion_len: int, soft_punish_cache: int
) -> list[float | None]:
    """0 up to `max_completion_len - soft_punish_cache` tokens, then falling linearly to -1 at `max_completion_len`.

    DAPO, arXiv:2503.14476, equation 13. Set `max_completion_len` to rollout.max_completion_length, and
    `soft_punish_cache` to the number of tokens before it that are penalised (the paper: 4096 of 20480).
    """
    if not 0 < soft_punish_cache <= max_completion_len:
        raise ValueError(
            f"soft_punish_cache={soft_punish_cache} must be between 1 and max_completion_len={max_completion_len}"
        )
    free = max_completion_len - soft_punish_cache
    return [-min(max(len(ids) - free, 0) / soft_punish_cache, 1.0) for ids in completion_ids]


REWARDS: Rewards = {
    "length": BuiltinReward(length, (0.0, 1.0), looks_at_text_only=True),
    "length_band": BuiltinReward(length_band, (0.0, 1.0), looks_at_text_only=True),
    "char_length": BuiltinReward(char_length, (-float("inf"), 0.0), looks_at_text_only=True),
    "soft_overlong_punishment": BuiltinReward(soft_overlong_punishment, (-1.0, 0.0), looks_at_text_only=True),
}
