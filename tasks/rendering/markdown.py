"""Escapes text from data, models and configurations for the Markdown that Prefect's page renders."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from tasks.rendering.visible import shortened

PUNCTUATION = re.compile(r"([!-/:-@[-`{-~])")
WHITE_ENDS = re.compile(r"^\s+|\s+$")
LINE_BREAK = re.compile(r"\r\n|[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]")


def escape(text: str) -> str:
    """Return Markdown that shows only the `shortened` text: it cannot make a tag, link, picture or table cell.

    Line breaks become ⏎. A backslash makes each ASCII punctuation character literal (CommonMark 0.31, section 2.4),
    also in addresses that renderers would turn into links. White space at the ends is removed: no page shows it, and it
    could begin a block of code or disable `**` around the text (sections 4.4 and 6.2). Text of only white space becomes
    character references.
    """
    text = shortened(LINE_BREAK.sub("⏎", text))
    shown = WHITE_ENDS.sub("", text)
    return PUNCTUATION.sub(r"\\\1", shown) if shown else "".join(f"&#{ord(character)};" for character in text)


def table(rows: Iterable[Sequence[Any]]) -> str:
    """Return a table that shows each value of `rows` as text; the first row is the head."""
    head, *others = ([escape(str(value)) for value in row] for row in rows)
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *others])
