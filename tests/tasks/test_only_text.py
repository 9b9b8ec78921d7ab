"""What data, models and people say is only text in the pages, artifacts, notes, tags and events that show it, and where
commands print it: no markup, no control characters, no megabytes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from typer.testing import CliRunner, Result

from flows.cli.compare import show
from flows.cli.main import app
from flows.cli.terminal import LONGEST as TERMINAL_LONGEST
from flows.cli.terminal import Terminal
from grpo_core.config.files import dump_config, parse_config
from tasks.evaluate import _escaped
from tasks.evaluate import _markdown as evaluation_markdown
from tasks.promotion import _markdown as promotion_markdown
from tasks.promotion import _payload, _question
from tasks.registry.approval import Approval, Change, tags_of
from tasks.registry.champion import Outcome
from tasks.rendering.page import Section
from tasks.rendering.page import Table as PageTable
from tasks.rendering.visible import visible
from tasks.reports import events
from tasks.reports.compare import comparison_page
from tasks.reports.record import read_record
from tasks.reports.report import report_page
from tasks.reports.sweep import make_choice, sweep_page
from tasks.sweep import _markdown as sweep_markdown
from tests.hostile import EVIL, is_seen, read, render
from tests.made_up import NUM_PROMPTS, made_up_run, outcomes_of, samples_of, values_of
from tests.pages import Page

OURS = {"h1", "h2", "p", "strong", "ul", "li", "table", "thead", "tbody", "tr", "th", "td"}
LONGEST = 40_000  # characters of Markdown that a text of two million may become
each_text = pytest.mark.parametrize("text", EVIL, ids=range(len(EVIL)))


def _assert_only_text(markdown: str, text: str, links: int = 0) -> None:
    """It has the text, and no elements but ours and so many links."""
    elements, shown = render(markdown)
    assert set(elements) - {"a"} <= OURS and elements.count("a") == links
    assert len(markdown) < LONGEST
    assert all(it in "\n\t" or is_seen(it) for it in markdown)
    assert len(text) > 2000 or read(text) in shown


@pytest.mark.slow
@each_text
def test_a_person_is_asked_with_the_reason_and_the_samples_as_text(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:5000")
    changes = (Change(text, text, text, -1.0), Change(text, text, text, 1.0))
    outcome = Outcome("waiting", "sums", "2", "1", text, None, changes)
    _assert_only_text(_question(outcome), text, links=1)
    _assert_only_text(promotion_markdown(text, outcome), text, links=1)


@each_text
def test_tags_and_events_have_a_person_s_words_without_what_a_database_refuses(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    approval = Approval(approved=True, by=text[:100], words=text[:1000])
    assert [*tags_of(approval).values()] == [visible(text[:100]), visible(text[:1000])]
    emitted: list[dict[str, Any]] = []
    monkeypatch.setattr(events, "emit_event", lambda *_, payload, **__: emitted.append(payload))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:5000")
    events.announce("promoted", "model", "sums", _payload(Outcome("promoted", "sums", "2", "1", text), approval))
    (payload,) = emitted
    assert all(it in "\n\t" or is_seen(it) for it in "".join(filter(None, payload.values())))
    assert len(json.dumps(payload)) < LONGEST


@pytest.mark.parametrize("text", [*EVIL, "    indented"], ids=range(len(EVIL) + 1))
def test_samples_of_an_evaluation_are_shown_as_text(text: str) -> None:
    _assert_only_text(_escaped(text), text.strip())
    assert len(text) > 2000 or render(_escaped(text)) == (["p"], read(text.strip()))
    conversation = _escaped([{"role": "user", "content": text}])
    _assert_only_text(conversation, "role")
    elements, shown = render(conversation)
    assert elements == ["p"] and shown.startswith('[{"role":"user","content":"')
    assert len(text) > 2000 or shown.endswith('"}]')
    assert [_escaped(value) for value in (None, 1, 0.5, True)] == [None, 1, 0.5, True]


@pytest.mark.slow
def test_sweeps_comparisons_and_evaluations_show_models_categories_and_answers_as_text(tmp_path: Path) -> None:
    """Two arms of a sweep over `model.name_or_path`: of the better one, all hostile texts are the model's name, a
    category of the prompts and what they are answered."""
    text = "\n".join(it.replace("\0", "") for it in EVIL[:-1])
    arms = {}
    for model in ("plain", text):
        values = values_of("arm", model={"name_or_path": model}, registry={"sweep": "sums.sweep"})
        right = {"base": outcomes_of(0, 0.3), "trained": np.full(NUM_PROMPTS, float(model == text))}
        samples = samples_of(right, completion=text, categories=(text, "others"))
        name = "hostile" if model == text else "plain"
        arms[name] = read_record(made_up_run(tmp_path / name, values, samples, []))
    choice = make_choice(arms)
    assert choice.arm == "hostile"
    _assert_only_text(evaluation_markdown(arms["hostile"].evaluation, "accuracy"), text)
    _assert_only_text(sweep_markdown("sums.sweep", choice, arms), text)
    pages = [sweep_page("sums.sweep", choice, arms), comparison_page(arms)]
    for page in map(Page, [*pages, report_page(arms["hostile"], 1.0, {}, "", "")]):
        assert not {tag for tag, _ in page.tags} & {"script", "img", "link", "iframe"}
        assert not page.references
        assert all(it in "\n\t" or is_seen(it) for it in page.text)
        assert "".join(visible(text).split()) in "".join(page.text.split())


OWN = re.compile(r"\x1b\[[0-9;]*m")  # colours
OVERSIZED = 60_000  # characters that no command prints for these inputs: the largest has two million


def _assert_printed(printed: str) -> None:
    assert len(printed) < OVERSIZED
    assert all(it in "\n\t" or is_seen(it) for it in OWN.sub("", printed))


def _printed(*shown: RenderableType) -> str:
    terminal = Terminal()
    with terminal.capture() as captured:
        terminal.print(*shown)
    return captured.get()


@pytest.mark.parametrize("text", EVIL, ids=range(len(EVIL)))
def test_a_string_is_printed_as_it_is_wherever_it_stands(text: str) -> None:
    table = Table.grid()
    table.add_row(text)
    for shown in (text, Padding(text, 2), table):
        printed = _printed(shown)
        _assert_printed(printed)
        if len(text) < TERMINAL_LONGEST:
            assert "".join(visible(text).split()) in "".join(printed.split())


@pytest.mark.parametrize("text", EVIL[:-1], ids=range(len(EVIL) - 1))
def test_a_section_of_a_comparison_is_only_text(text: str) -> None:
    terminal = Terminal()
    with terminal.capture() as captured:
        show(
            Section(text, text, tables=[PageTable([text, text], [[text, (text, text)]], text)], notes=[text]), terminal
        )
    _assert_printed(captured.get())


def _run(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def _config(tmp_path: Path, **sections: dict[str, object]) -> Path:
    rows = pl.DataFrame({"prompt": [f"{it} {row}" for row, it in enumerate(EVIL)], "answer": EVIL})
    rows.write_parquet(tmp_path / "hostile.parquet")
    data = str(tmp_path / "hostile.parquet")
    values = {**values_of("hostile"), "data": {"train": data, "eval": data}, **sections}
    config = tmp_path / "config.toml"
    config.write_text(dump_config(parse_config(values)))
    return config


@pytest.mark.slow
def test_a_reward_is_tried_on_hostile_rows_and_completions(tmp_path: Path) -> None:
    config = _config(tmp_path, rewards=[{"function": "exact_match"}])
    for row, text in enumerate(EVIL):
        tried = _run("rewards", "try", str(config), "--row", str(row), "--completion", text)
        assert tried.exit_code == 0, tried.output
        _assert_printed(tried.output)


@pytest.mark.slow
@pytest.mark.parametrize("text", [it for it in EVIL if "\0" not in it], ids=range(len(EVIL) - 1))
def test_refusals_and_plans_show_a_hostile_name_of_a_model_as_text(text: str, tmp_path: Path) -> None:
    config = _config(tmp_path, model={"name_or_path": text})
    for arguments in (("plan", str(config)), ("data", "check", str(config)), ("run", text), ("status", text)):
        printed = _run(*arguments)
        assert printed.exit_code == 2, (arguments, printed.output)
        assert printed.exception is None or isinstance(printed.exception, SystemExit)
        _assert_printed(printed.output)


def test_a_file_of_hostile_rows_is_checked(tmp_path: Path) -> None:
    rows = pl.DataFrame({text[:200]: [text] for text in EVIL})
    rows.write_parquet(tmp_path / "rows.parquet")
    schema = {"schema_type": "dataframe", "version": "0", "columns": {}, "strict": True}
    schema["columns"] = {
        name: {"dtype": "str", "nullable": False, "checks": {"str_length": {"max_value": 1}}} for name in rows.columns
    }
    (tmp_path / "contract.yaml").write_text(json.dumps(schema))
    checked = _run("data", "check", str(tmp_path / "rows.parquet"), "--schema", str(tmp_path / "contract.yaml"))
    assert checked.exit_code == 2, checked.output
    _assert_printed(checked.output)
