"""What a teacher reads in the place of a prompt: the same prompt, with text that the policy does not see. Imports no
torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grpo_core.config.columns import template_parts
from grpo_core.config.teacher import BETTER, ERROR, PROMPT
from grpo_core.data.chat import is_conversation, without_gaps

LINES = "\n"  # between the texts of a list
STAND_INS = dict.fromkeys((BETTER, ERROR), "x")  # for texts that are not known before the sampling


def shown_prompt(template: str, row: Mapping[str, Any], found: Mapping[str, str]) -> Any:
    """The row's prompt with the filled template in the place of its last user message; of a prompt that is text, in the
    place of all of it. `found`: texts that are no columns. None if a place has nothing to show."""
    prompt = row[PROMPT]
    if not is_conversation(prompt):
        return _filled(template, {**row, **found})
    messages = without_gaps(prompt)
    place = max((place for place, message in enumerate(messages) if message["role"] == "user"), default=None)
    if place is None:
        return None
    text = _filled(template, {**row, **found, PROMPT: messages[place].get("content")})
    return text and [*messages[:place], {**messages[place], "content": text}, *messages[place + 1 :]]


def _filled(template: str, values: Mapping[str, Any]) -> str | None:
    """The template with its places filled; None if a value is missing or blank."""
    parts = []
    for text, place in template_parts(template):
        parts += [text, written(values.get(place)) if place else ""]
        if place and not parts[-1].strip():
            return None
    return "".join(parts)


def written(value: Any) -> str:
    """A value as text: whole numbers as such, the texts of a list below each other; "" for None."""
    if isinstance(value, list):
        return LINES.join(map(written, value))
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return "" if value is None else str(value)
