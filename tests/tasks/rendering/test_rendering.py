"""Figures in words, and what data, models and configurations say as text in Prefect's Markdown, whatever it is."""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path

import polars as pl
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from grpo_core.evaluation.statistics import paired_difference
from tasks.data.repeats import FINDING
from tasks.rendering.figures import verdict
from tasks.rendering.markdown import escape, table
from tasks.rendering.visible import visible
from tasks.reports.data_report import markdown
from tests.hostile import HOSTILE, is_seen, read, render


@pytest.mark.parametrize(
    ("metric", "before", "after", "sentence"),
    [
        ("accuracy", [0.0] * 20, [1.0] * 10 + [0.0] * 10, r"better than the base by 50\.0 points \(p = 0\.00098\)"),
        ("accuracy", [1.0] * 20, [0.0] * 10 + [1.0] * 10, r"worse than the base by 50\.0 points"),
        (
            "accuracy",
            [0.0, 1.0] * 10,
            [1.0, 0.0] * 10,
            r"no difference from the base could be shown: with 20 prompts, a true gain of \d+\.\d points or "
            r"more is detected 80% of the time",
        ),
        (
            "accuracy",
            [0.0] + [1.0] * 19,
            [1.0] + [0.0] * 5 + [1.0] * 14,
            r"likely worse than the base by 20\.0 points, which is not shown yet: the interval is "
            r"\[-\d+\.\d, \d\.\d\]; with 20 prompts, a true gain of \d+\.\d points or more is detected 80% of the time",
        ),
        (
            "accuracy",
            [1.0] + [0.0] * 19,
            [0.0] + [1.0] * 5 + [0.0] * 14,
            r"likely better than the base by 20\.0 points, which is not shown yet: the interval is .*",
        ),
        ("accuracy", [math.nan], [1.0], "no comparison with the base: no prompt was scored for both"),
        ("reward", [-3.0] * 20, [-2.74] * 20, r"better than the base by 0\.260 in reward \(p = [\de.-]+\)"),
        ("reward", [4.0] * 20, [2.5] * 20, r"worse than the base by 1\.500 in reward"),
        (
            "reward",
            [1.5, 4.0] * 10,
            [4.0, 1.5] * 10,
            r"no difference from the base in reward could be shown: with 20 prompts, a true gain of \d+\.\d{3} "
            r"or more is detected 80% of the time",
        ),
        (
            "accuracy",
            [0.0] * 2,
            [0.0] * 2,
            "no difference from the base could be shown: 2 prompts cannot show any gain",
        ),
        ("accuracy", [0.0], [1.0], "no difference from the base could be shown: one prompt cannot show any gain"),
        ("reward", [1.0], [1.0], r".* with one prompt, .*"),
    ],
)
def test_the_verdict_says_what_the_figures_mean_in_the_metric_s_unit(
    metric: str, before: list[float], after: list[float], sentence: str
) -> None:
    bounds = (0.0, 1.0) if metric == "accuracy" else (-math.inf, math.inf)
    difference = vars(paired_difference(before, after, 0.95, bounds))
    assert re.fullmatch(sentence, verdict(metric, difference, "base", "prompts"))


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
