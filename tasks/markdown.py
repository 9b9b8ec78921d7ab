"""Text of a run's data, models and configuration inside the Markdown that Prefect's page renders."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

PUNCTUATION = re.compile(r"([!-/:-@[-`{-~])")
LINE_BREAK = re.compile(r"\r\n|[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]")


def escape(text: str) -> str:
    """Markdown that shows `text` and nothing else: no tag, link, picture or table cell of its own, line breaks as ⏎.

    A backslash makes each ASCII punctuation character literal (CommonMark 0.31, section 2.4); addresses that renderers
    turn into links by themselves need one such character too.
    """
    return PUNCTUATION.sub(r"\\\1", LINE_BREAK.sub("⏎", text))


def table(rows: Iterable[Sequence[Any]]) -> str:
    """A table that shows each value of `rows` as text; the first row is its head."""
    head, *others = ([escape(str(value)) for value in row] for row in rows)
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *others])
