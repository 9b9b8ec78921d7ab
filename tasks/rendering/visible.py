"""Text from outside as a terminal or a page can show it: nothing in it is obeyed or hidden."""

from __future__ import annotations

import re

# Control characters, of which a terminal obeys some, and characters that change the order in which others are shown
# (Unicode Standard Annex 9, section 2). Line breaks and tabs stay.
UNSHOWN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ufeff]")
LONGEST_TEXT = 3000  # characters


def visible(text: str) -> str:
    """The text with each control character and each mark of direction as its code, such as \\x1b or \\u202e."""
    return UNSHOWN.sub(lambda found: _code(ord(found[0])), text.replace("\r\n", "\n"))


def _code(character: int) -> str:
    return f"\\x{character:02x}" if character < 0x100 else f"\\u{character:04x}"


def shortened(text: str, most: int = LONGEST_TEXT) -> str:
    """The text as `visible`; of one that is longer than `most` characters, the beginning and, where an answer stands,
    the end."""
    left_out = len(text) - most
    if left_out <= 0:
        return visible(text)
    end = most // 3
    return visible(f"{text[: most - end]} … {left_out:,} more characters … {text[-end:]}")
