"""Rewards for a completion's form: pattern, tags."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_core.data.chat import text_of
from grpo_core.rewards.builtin.record import BuiltinReward, Rewards

INNERMOST = re.compile(r"(?<!\\)\((\?(?::|P<\w+>|<?[=!]))?((?:[^()\\]|\\.)*)\)(\?|\*|\{0)?")  # group of a pattern
ALTERNATIVES = re.compile(r"(?<!\\)\|")


def format_regex(completions: Sequence[Any], pattern: str) -> list[float | None]:
    """1 if the whole completion matches `pattern` (a dot matches line ends too), else 0."""
    expression = re.compile(pattern, re.DOTALL)
    return [float(expression.fullmatch(text_of(completion)) is not None) for completion in completions]


def tags(completions: Sequence[Any], tags: Sequence[str] = ("think", "answer")) -> list[float | None]:
    """Share of `tags` that are in place, from 0 to 1; 1 for `<think>…</think><answer>…</answer>`.

    A tag is in place if `<tag>` and `</tag>` occur exactly once each, in this order, with text between them, and after
    the end of the tags before it. Text outside of tags is allowed; `format_regex` looks at the whole completion.
    """
    if not tags or isinstance(tags, str) or len(set(tags)) < len(tags):
        raise ValueError(f"tags={tags!r} must be a list of different names")
    return [_tags_in_place(text_of(completion), tags) / len(tags) for completion in completions]


def _tags_in_place(text: str, tags: Sequence[str]) -> int:
    end = count = 0
    for tag in tags:
        opening, closing = f"<{tag}>", f"</{tag}>"
        if text.count(opening) == text.count(closing) == 1:
            start, stop = text.index(opening), text.index(closing)
            if end <= start < stop and text[start + len(opening) : stop].strip():
                end = stop + len(closing)
                count += 1
    return count


def required_text(pattern: str) -> str:
    """The pattern without parentheses, backslashes before signs, and the groups that a match may lack (optional ones,
    alternatives, look-arounds): a fixed text that every match contains is part of it."""

    def content(group: re.Match[str]) -> str:
        kind, inside, repeated = group.groups(default="")
        return "" if repeated or ALTERNATIVES.search(inside) or kind.endswith(("=", "!")) else inside

    found = 1
    while found:
        pattern, found = INNERMOST.subn(content, pattern)
    return "" if ALTERNATIVES.search(pattern) else re.sub(r"\\(\W)", r"\1", pattern)


def _tags_looked_for(args: Mapping[str, Any]) -> str:
    return " ".join(f"<{tag}> </{tag}>" for tag in args.get("tags", ("think", "answer")))


REWARDS: Rewards = {
    "format_regex": BuiltinReward(
        format_regex,
        (0.0, 1.0),
        looks_at_text_only=True,
        looks_for=lambda args: required_text(str(args.get("pattern", ""))),
    ),
    "tags": BuiltinReward(tags, (0.0, 1.0), looks_at_text_only=True, looks_for=_tags_looked_for),
}
