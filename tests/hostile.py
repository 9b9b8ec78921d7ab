"""Texts that try to be more than text where they are shown: in Markdown, HTML and a terminal."""

from __future__ import annotations

import unicodedata

from markdown_it import MarkdownIt

from tests.pages import Page

HOSTILE = [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "[a](javascript:alert(1))",
    "![t](http://evil.example/x.png)",
    "![t][x]\n\n[x]: http://evil.example/x.png",
    "[a](&#104;ttp://evil.example) [b](http\\://evil.example) [c](http&colon;//evil.example) [d](\\//evil.example)",
    "> [e]\n\n> [e]: &#104;ttp://evil.example 'title'\n\n- [f\ng]:\n  //evil.example\n\n[f g] [f g][] [f g][e]",
    "<http://evil.example> http://evil.example www.evil.example a@evil.example",
    "`code` ```` **bold** _it_ ~~gone~~",
    "a | b || c \\| d \\\\| e \\",
    "&lt;b&gt; &#60;b&#62;",
    "# one\n## two\r\n- three\n1. four\n> five\n    six\n---\n===\u2028seven\u0085eight\vnine",
    "\tindented",
    "    indented ",
    "\u202egnp.exe\u202c \u2066isolated\u2069",
]
LONGEST = "x" * 2_000_000 + "the end"
EVIL = [
    *HOSTILE,
    "[red]rich[/red] [link=http://evil.example]markup[/link] [/]",
    "\x1b[2J\x1b]0;title\x07 \x1b]8;;http://evil.example\x1b\\click\x1b]8;;\x1b\\ \x9b31m \x00 \x08\x08 \r over \x7f",
    "\u202egnp.exe\u202c \u2066isolated\u2069 \u200fmark\u061c \u2028 \ufeff",
    "zero\u200bwidth word\u2060joiner soft\xadhyphen \U000e0041\U000e0042 \a\v\f",
    "</pre></div></details><script>alert(1)</script>{{ 7 * 7 }}{% raw %}",
    LONGEST,
]
# Format characters (category Cf) that are part of writing: joiners, and marks that are seen.
WRITTEN = "\u200c\u200d\u0600\u0601\u0602\u0603\u0604\u0605\u06dd\u070f\u0890\u0891\u08e2\U000110bd\U000110cd"
RENDERER = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])


def render(source: str) -> tuple[list[str], str]:
    """Its elements, and its text without white space."""
    page = Page(RENDERER.render(source))
    return [tag for tag, _ in page.tags], "".join(page.text.split())


def read(text: str) -> str:
    """`text` as it is to be read in Markdown, without white space."""
    for line_break in ("\r\n", *"\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"):
        text = text.replace(line_break, "⏎")
    return "".join("".join(it if it == "\t" else as_code(it) for it in text).split())


def as_code(character: str) -> str:
    """The character, or its code if it is obeyed or not seen."""
    return character if is_seen(character) else character.encode("unicode_escape").decode()


def is_seen(character: str) -> bool:
    return unicodedata.category(character) not in ("Cc", "Cf", "Cs") or character in WRITTEN
