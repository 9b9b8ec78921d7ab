"""Rewards for the right answer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal, DecimalException, InvalidOperation
from typing import Any

from grpo_core.rewards.basics import Rewards, text_of

# A minus right after a digit, letter or closing bracket subtracts or ranges; it is no sign.
NUMBER = re.compile(
    r"(?:(?<![\w)\]])[-+])?(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?)"
)


def exact_match(completions: Sequence[Any], answer: Sequence[str | int | float]) -> list[float | None]:
    """1 when the completion is the answer, white space around either ignored, else 0. None where there is no answer."""
    return [
        None if expected is None else float(text_of(completion).strip() == str(expected).strip())
        for completion, expected in zip(completions, answer, strict=True)
    ]


def numeric_match(
    completions: Sequence[Any], answer: Sequence[str | int | float], tolerance: float = 0.0
) -> list[float | None]:
    """1 when the last number in the completion equals the answer within `tolerance`, else 0.

    Thousands separators, signs, decimals and exponents are read; None where the answer is missing or not a number.
    """
    return [
        _numbers_agree(text_of(completion), expected, tolerance)
        for completion, expected in zip(completions, answer, strict=True)
    ]


def _numbers_agree(text: str, expected: Any, tolerance: float) -> float | None:
    try:
        wanted = Decimal(str(expected).strip().replace(",", ""))
    except InvalidOperation:
        return None
    if not wanted.is_finite():
        return None
    found = NUMBER.findall(text)
    if not found:
        return 0.0
    try:
        return float(abs(Decimal(found[-1].replace(",", "")) - wanted) <= Decimal(str(tolerance)))
    except DecimalException:  # an exponent beyond any answer's: 1e9999999
        return 0.0


REWARDS: Rewards = {
    "exact_match": (exact_match, (0.0, 1.0)),
    "numeric_match": (numeric_match, (0.0, 1.0)),
}
