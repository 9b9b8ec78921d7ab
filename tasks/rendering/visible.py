"""Makes text from outside safe to show in a terminal or a page: it contains no commands and no invisible characters."""

from __future__ import annotations

import re

# Control characters, some of which a terminal executes; characters that change the order in which others are shown
# (Unicode Standard Annex 9, section 2) or that no font has; surrogates, which files cannot hold. Not line breaks and
# tabs.
UNSHOWN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff\ufff9-\ufffb"
    "\U00013430-\U0001343f\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e007f]"
)
LONGEST_TEXT = 3000  # characters


def visible(text: str) -> str:
    """Replace each control or invisible character by its code, such as \\x1b or \\u202e."""
    return UNSHOWN.sub(lambda found: found[0].encode("unicode_escape").decode(), text.replace("\r\n", "\n"))


def shortened(text: str, most: int = LONGEST_TEXT) -> str:
    """Make the text `visible`; if it is longer than `most` characters, keep only the beginning and the end, where
    answers usually are."""
    left_out = len(text) - most
    if left_out <= 0:
        return visible(text)
    end = most // 3
    return visible(f"{text[: most - end]} … {left_out:,} more characters … {text[-end:]}")
