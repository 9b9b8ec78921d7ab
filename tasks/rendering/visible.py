"""Text from outside as a terminal or a page can show it: nothing in it is obeyed or hidden."""

from __future__ import annotations

import re

# Control characters, of which a terminal obeys some; characters that change the order in which others are shown
# (Unicode Standard Annex 9, section 2) or that no font has; surrogates, which no file takes. Line breaks and tabs stay.
UNSHOWN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff\ufff9-\ufffb"
    "\U000e0000-\U000e007f]"
)
LONGEST_TEXT = 3000  # characters


def visible(text: str) -> str:
    """The text with each character that is obeyed or not seen as its code, such as \\x1b or \\u202e."""
    return UNSHOWN.sub(lambda found: found[0].encode("unicode_escape").decode(), text.replace("\r\n", "\n"))


def shortened(text: str, most: int = LONGEST_TEXT) -> str:
    """The text as `visible`; of one that is longer than `most` characters, the beginning and, where an answer stands,
    the end."""
    left_out = len(text) - most
    if left_out <= 0:
        return visible(text)
    end = most // 3
    return visible(f"{text[: most - end]} … {left_out:,} more characters … {text[-end:]}")
