"""What data, models and people say is only text in the pages, artifacts, notes, tags and events that show it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tasks.evaluate import _escaped
from tasks.evaluate import _markdown as evaluation_markdown
from tasks.promotion import _markdown as promotion_markdown
from tasks.promotion import _payload, _question
from tasks.registry.approval import Approval, Change, tags_of
from tasks.registry.champion import Outcome
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
