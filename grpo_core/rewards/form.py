"""Rewards for a completion's form: pattern and length."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from grpo_core.rewards.basics import Rewards, text_of


def format_regex(completions: Sequence[Any], pattern: str) -> list[float | None]:
    """1 when the whole completion matches `pattern` (a dot matches line ends too), else 0."""
    expression = re.compile(pattern, re.DOTALL)
    return [float(expression.fullmatch(text_of(completion)) is not None) for completion in completions]


def length(completion_ids: Sequence[Sequence[int]], target: int) -> list[float | None]:
    """1 at `target` tokens (the end token counts), falling linearly to 0 at none and at twice the target."""
    return [max(0.0, 1.0 - abs(len(ids) - target) / target) for ids in completion_ids]


def soft_overlong_punishment(
    completion_ids: Sequence[Sequence[int]], max_completion_len: int, soft_punish_cache: int
) -> list[float | None]:
    """0 up to `max_completion_len - soft_punish_cache` tokens, then falling linearly to -1 at `max_completion_len`.

    DAPO, arXiv:2503.14476, equation 13. Give rollout.max_completion_length as `max_completion_len`, and for
    `soft_punish_cache` the tokens before it that are to be punished (the paper: 4096 of 20480).
    """
    if not 0 < soft_punish_cache <= max_completion_len:
        raise ValueError(
            f"soft_punish_cache={soft_punish_cache} must be between 1 and max_completion_len={max_completion_len}"
        )
    free = max_completion_len - soft_punish_cache
    return [-min(max(len(ids) - free, 0) / soft_punish_cache, 1.0) for ids in completion_ids]


REWARDS: Rewards = {
    "format_regex": (format_regex, (0.0, 1.0)),
    "length": (length, (0.0, 1.0)),
    "soft_overlong_punishment": (soft_overlong_punishment, (-1.0, 0.0)),
}
