"""What the modules of built-in rewards share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

RewardFunction = Callable[..., Any]  # the rewards, or a coroutine that gives them
Range = tuple[float, float]
Rewards = Mapping[str, tuple[RewardFunction, Range]]  # by name, each with the lowest and the highest value it gives


def text_of(completion: str | Sequence[dict[str, str]]) -> str:
    """The text of a completion: itself, or the content of a conversation's last message."""
    return completion if isinstance(completion, str) else completion[-1]["content"]
