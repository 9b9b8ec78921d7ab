"""Escapes text from data, models and configurations for the Markdown that Prefect's page renders."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

PUNCTUATION = re.compile(r"([!-/:-@[-`{-~])")
# Characters that show what follows in another order than it is in (Unicode Standard Annex 9, section 2).
REORDERING = re.compile("[\u202a-\u202e\u2066-\u2069]")
WHITE_ENDS = re.compile(r"^[^\S\x1f]+|[^\S\x1f]+$")  # U+001F is white space for Python, not for Markdown
LINE_BREAK = re.compile(r"\r\n|[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]")


def escape(text: str) -> str:
    """Markdown that shows `text` and nothing else: no tag, link, picture or table cell of its own.

    Line breaks become ⏎, and characters that change the direction of writing become their codes, such as \\u202e.
    A backslash makes each ASCII punctuation character literal (CommonMark 0.31, section 2.4), also in addresses that
    renderers would turn into links. White space at the ends is left out: no page shows it, and it could begin a block
    of code or stop `**` around it from being marks (sections 4.4 and 6.2). Text of white space alone becomes character
    references.
    """
    text = REORDERING.sub(lambda found: f"\\u{ord(found[0]):x}", LINE_BREAK.sub("⏎", text))
    shown = WHITE_ENDS.sub("", text)
    return PUNCTUATION.sub(r"\\\1", shown) if shown else "".join(f"&#{ord(character)};" for character in text)


def table(rows: Iterable[Sequence[Any]]) -> str:
    """A table that shows each value of `rows` as text; the first row is its head."""
    head, *others = ([escape(str(value)) for value in row] for row in rows)
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *others])
