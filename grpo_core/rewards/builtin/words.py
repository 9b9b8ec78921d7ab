"""Words and n-grams of a text, in any script."""

from __future__ import annotations

import re
from collections.abc import Sequence

# Scripts that are written without spaces give a word a character. A run of letters longer than any word is cut, so that
# "hahaha…" repeats itself; signs and emoji stand alone, so that "!!!!" does too.
NO_SPACES = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
WORD = re.compile(rf"[{NO_SPACES}]|[^\W_{NO_SPACES}]{{1,24}}|[^\w\s]|_")


def words(text: str, signs: bool = False) -> list[str]:
    """The words of a text without regard to case; with `signs`, punctuation marks and emoji count as words too."""
    return [word for word in WORD.findall(text.casefold()) if signs or word[0].isalnum()]


def ngrams(items: Sequence[str], n: int) -> list[tuple[str, ...]]:
    """All runs of `n` items, in order; [] if there are fewer items. Raises ValueError if `n` is below 1."""
    if n < 1:
        raise ValueError(f"n={n} must be at least 1")
    return [tuple(items[i : i + n]) for i in range(len(items) - n + 1)]
