"""What data, models and configurations say stands in Prefect's Markdown as text, whatever it is."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from tasks.data.repeats import FINDING
from tasks.rendering.markdown import escape, table
from tasks.reports.data_report import markdown
from tests.pages import Page

HOSTILE = [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "[a](javascript:alert(1))",
    "![t](http://evil.example/x.png)",
    "![t][x]\n\n[x]: http://evil.example/x.png",
    "<http://evil.example> http://evil.example www.evil.example a@evil.example",
    "`code` ```` **bold** _it_ ~~gone~~",
    "a | b || c \\| d \\\\| e \\",
    "&lt;b&gt; &#60;b&#62;",
    "# one\n## two\r\n- three\n1. four\n> five\n    six\n---\n===\u2028seven\u0085eight\vnine",
    "\tindented",
    "    indented ",
    "\u202egnp.exe\u202c \u2066isolated\u2069",
]
MARKS = st.text("<>[]()!`*_~|\\&#;:/.@-+=>$^{}\"'?,% \n\r\t1ahtpw\xa0\u202a\u202e\u2066\u2069", max_size=40)
TEXTS = st.sampled_from(HOSTILE) | MARKS | st.text(max_size=40)
RENDERER = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])


def render(source: str) -> tuple[list[str], str]:
    """Its elements, and its text without white space."""
    page = Page(RENDERER.render(source))
    return [tag for tag, _ in page.tags], "".join(page.text.split())


def read(text: str) -> str:
    """`text` as it is to be read, without white space; nothing shows U+0000 (CommonMark 0.31, section 2.3)."""
    for line_break in ("\r\n", *"\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"):
        text = text.replace(line_break, "⏎")
    for code in ("202a", "202b", "202c", "202d", "202e", "2066", "2067", "2068", "2069"):
        text = text.replace(chr(int(code, 16)), f"\\u{code}")
    return "".join(text.replace("\0", "\ufffd").split())


@pytest.mark.parametrize(
    ("around", "elements"),
    [("# x{} y", ["h1"]), ("x{}", ["p"]), ("- x{}", ["ul", "li"]), ("**x{}.**", ["p", "strong"])],
)
@given(text=TEXTS)
def test_escaped_text_is_shown_as_it_is_and_makes_no_element(around: str, elements: list[str], text: str) -> None:
    shown = around.strip("#-* ").format(text)
    assert render(around.format(escape(text))) == (elements, read(shown))


@pytest.mark.parametrize(("around", "elements"), [("{}", ["p"]), ("**{}**", ["p", "strong"]), ("- {}", ["ul", "li"])])
@given(text=TEXTS.filter(bool) | st.text(" \t\xa0", min_size=1, max_size=8))
@example(text="    indented")
@example(text="\tindented")
@example(text="  ")
def test_escaped_text_may_begin_and_be_the_whole_of_a_block(around: str, elements: list[str], text: str) -> None:
    assert render(around.format(escape(text))) == (elements, read(text))


@given(row=st.tuples(TEXTS, TEXTS))
def test_a_table_shows_each_value_in_its_own_cell(row: tuple[str, str]) -> None:
    elements = ["table", "thead", "tr", "th", "th", "tbody", "tr", "td", "td"]
    assert render(table([("one", "two"), row])) == (elements, "onetwo" + read(row[0]) + read(row[1]))


@pytest.mark.parametrize("hostile", HOSTILE)
def test_the_data_report_shows_a_prompt_and_a_columns_name_as_text(hostile: str, tmp_path: Path) -> None:
    finding = {"dataset": "train", "row": 0, "column": hostile, "check": "blank", "value": hostile}
    broken = {"check": "blank", "severity": "drop", "rows": 1, "dataset": "train", "column": hostile, "rule": "is"}
    report = {
        "shape": [f"train has {hostile}"],
        "parts": {"train": {"rows_read": 1, "num_prompts": 1, "source": hostile}},
        "findings": [broken],
        "shared": [{"dataset": hostile, "other": hostile, "check": "overlap", "rows": 1}],
        "lengths": {},
    }
    elements, text = render(markdown(report, pl.DataFrame([finding], schema=FINDING), tmp_path))
    assert set(elements) == {"h1", "h2", "p", "strong", "table", "thead", "tbody", "tr", "th", "td"}
    assert text.count(read(hostile)) == 7
