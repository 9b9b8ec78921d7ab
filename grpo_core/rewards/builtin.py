"""Built-in rewards, computed from the completion's text or length. Each says its range."""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal, DecimalException, InvalidOperation
from typing import Any

# A minus right after a digit, letter or closing bracket subtracts or ranges; it is no sign.
NUMBER = re.compile(
    r"(?:(?<![\w)\]])[-+])?(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?)"
)


def text_of(completion: str | Sequence[dict[str, str]]) -> str:
    """The text of a completion: itself, or the content of a conversation's last message."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


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
