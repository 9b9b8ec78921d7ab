"""Prompt and answer of an exported conversation that ends with the answer, as functions for `[data.columns]`.

Known are `messages` (OpenAI's: role, content) and `conversations` (ShareGPT's: from, value).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

COLUMNS = ("messages", "conversations")
ROLES = {"human": "user", "gpt": "assistant"}  # ShareGPT's names, where they are not the usual ones


def asked(row: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """The conversation before its answer; None if it does not end with one."""
    turns = conversation(row)
    return turns[:-1] if turns and turns[-1]["role"] == "assistant" else None


def answered(row: Mapping[str, Any]) -> str | None:
    """The answer at the end of the conversation; None if it does not end with one."""
    turns = conversation(row)
    return turns[-1]["content"] if turns and turns[-1]["role"] == "assistant" else None


def conversation(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The row's messages, with their roles as models know them; [] if it has none."""
    for column in COLUMNS:
        given = row.get(column)
        if isinstance(given, Sequence) and given and all(isinstance(turn, Mapping) for turn in given):
            return [_message(turn) for turn in given]
    return []


def _message(turn: Mapping[str, Any]) -> dict[str, Any]:
    if "from" not in turn:
        return {"role": None, "content": None, **turn}
    return {"role": ROLES.get(turn["from"], turn["from"]), "content": turn.get("value")}
