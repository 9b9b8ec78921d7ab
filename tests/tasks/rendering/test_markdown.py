"""What data, models and configurations say stands in Prefect's Markdown as text, whatever it is."""

from __future__ import annotations

import sys
from pathlib import Path

import polars as pl
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tasks.data.repeats import FINDING
from tasks.rendering.markdown import escape, table
from tasks.rendering.visible import visible
from tasks.reports.data_report import markdown
from tests.hostile import HOSTILE, is_seen, read, render

MARKS = st.text("<>[]()!`*_~|\\&#;:/.@-+=>$^{}\"'?,% \n\r\t1ahtpw\xa0\u202a\u202e\u2066\u2069", max_size=40)
TEXTS = st.sampled_from(HOSTILE) | MARKS | st.text(max_size=40)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("around", "elements"),
    [("# x{} y", ["h1"]), ("x{}", ["p"]), ("- x{}", ["ul", "li"]), ("**x{}.**", ["p", "strong"])],
)
@given(text=TEXTS)
def test_escaped_text_is_shown_as_it_is_and_makes_no_element(around: str, elements: list[str], text: str) -> None:
    shown = around.strip("#-* ").format(text)
    assert render(around.format(escape(text))) == (elements, read(shown))


@pytest.mark.slow
@pytest.mark.parametrize(("around", "elements"), [("{}", ["p"]), ("**{}**", ["p", "strong"]), ("- {}", ["ul", "li"])])
@given(text=TEXTS.filter(bool) | st.text(" \t\xa0", min_size=1, max_size=8))
@example(text="    indented")
@example(text="\tindented")
@example(text="  ")
def test_escaped_text_may_begin_and_be_the_whole_of_a_block(around: str, elements: list[str], text: str) -> None:
    assert render(around.format(escape(text))) == (elements, read(text))


@pytest.mark.slow
def test_every_character_that_is_obeyed_or_not_seen_is_shown_by_its_code() -> None:
    characters = {chr(code) for code in range(sys.maxunicode + 1)} - {"\n", "\t"}
    assert sorted(it for it in characters if not is_seen(it) and visible(it) == it) == []


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
