"""Rollouts are traces in MLflow: the telling ones of each batch, with all that was recorded of them, each once."""

from __future__ import annotations

import base64
import io
import itertools
import json
import logging
import math
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from mlflow.entities import Trace
from mlflow.tracing.client import TracingClient
from PIL import Image

from grpo_core.config.files import parse_config
from grpo_core.config.run import RunConfig
from grpo_core.data.images import FILE, MARK
from tasks.rendering.visible import UNSHOWN, shortened
from tasks.tracking import traces as module
from tasks.tracking.traces import (
    LONGEST_PREVIEW,
    LONGEST_TEXT,
    MOST_AT_END,
    _spread,
    _text,
    choose,
    send_rest_of_rollouts,
    tracing,
)
from tests.e2e.traced import traces_of
from tests.hostile import EVIL
from tests.made_up import sampled, values_of, write_sampled
from tests.processes import wait_for
from tests.vision import picture, png

G = 2
LOG = logging.getLogger("traces")


def _config(count: int = 4) -> RunConfig:
    return parse_config(values_of("traced", registry={"traces_per_batch": count}))


def _batch(step: int, **columns: Any) -> list[dict[str, Any]]:
    """Four groups of two: the first all wrong, the last all right."""
    right = [0.0, 0.0, 1.0, 0.0, None, 1.0, 1.0, 1.0]
    return [
        sampled(step, row, {"numeric_match": right[2 * row + k]}, advantage=row - 1.5, **columns)
        | {"completion": f"{step} {row} {k}"}
        for row in range(4)
        for k in range(G)
    ]


def _content(found: list[Trace]) -> list[Any]:
    """All of the traces, except where MLflow keeps them."""
    return [
        (
            it.info.trace_id,
            it.info.request_time,
            {name: value for name, value in it.info.tags.items() if name != "mlflow.artifactLocation"},
            it.info.trace_metadata,
            it.info.request_preview,
            it.info.response_preview,
            [(a.assessment_id, a.name, a.value, a.create_time_ms) for a in it.info.assessments],
            [span.to_dict() for span in it.data.spans],
        )
        for it in found
    ]


@given(
    st.lists(st.sampled_from([0.0, 0.5, 1.0, math.nan]), min_size=2, max_size=24).filter(lambda it: len(it) % 2 == 0),
    st.integers(1, 30),
)
def test_the_worst_and_the_best_group_are_always_among_the_chosen(rewards: list[float], count: int) -> None:
    groups = [place // 2 for place in range(len(rewards))]
    chosen = choose(rewards, groups, count)
    assert len(chosen) == len({*chosen}) == min(count, len(rewards))
    values = [-math.inf if math.isnan(value) else value for value in rewards]
    scored = [[it for it in values[2 * group : 2 * group + 2] if it > -math.inf] for group in range(len(rewards) // 2)]
    means = [sum(of_group) / len(of_group) if of_group else -math.inf for of_group in scored]
    assert means[groups[chosen[0]]] == min(means)
    assert values[chosen[0]] == min(values[2 * groups[chosen[0]] : 2 * groups[chosen[0]] + 2])
    if count >= 4 and len(rewards) >= 4:
        assert means[groups[chosen[2]]] == max(means)
        assert values[chosen[3]] == max(values[2 * groups[chosen[2]] : 2 * groups[chosen[2]] + 2])
        assert len({groups[place] for place in chosen[:4]}) == 2


@pytest.mark.slow
def test_a_trace_has_what_was_asked_said_and_given_and_is_found_by_its_tags(
    mlflow_client: Any, tracked: dict[str, Any], tmp_path: Path
) -> None:
    write_sampled(tmp_path, [_batch(1), _batch(2, ages=[0, 2, 1])], G)
    send_rest_of_rollouts(tracked, tmp_path, _config(), LOG)
    assert len(traces_of(tracked)) == 8
    [found] = traces_of(tracked, "tags.step = '2' AND tags.row = '3' AND tags.group = '3'")[:1]
    tags = {name: value for name, value in found.info.tags.items() if not name.startswith("mlflow.")}
    assert tags == {
        "kind": "rollout",
        "run": "traced",
        "step": "2",
        "weights": "after update 1, its oldest token 2 earlier",
        "batch": "1",
        "group": "3",
        "row": "3",
        "reward": "1",
        "advantage": "1.5",
        "tokens": "3",
        "truncated": "false",
    }
    [root] = found.data.spans
    assert root.inputs == {"messages": [{"role": "user", "content": "3+1="}]}
    assert root.outputs["messages"][0]["content"].startswith("2 3 ")
    assert [(it.name, it.value) for it in found.info.assessments] == [("numeric_match", 1.0)]
    assert json.loads(found.info.trace_metadata["mlflow.trace.tokenUsage"]) == {
        "input_tokens": 3,
        "output_tokens": 3,
        "total_tokens": 6,
    }
    assert {it.info.tags["row"] for it in traces_of(tracked)} == {"0", "3"}, "the worst and the best group"
    assert len(traces_of(tracked, "feedback.numeric_match = '1.0'")) == 4


@pytest.mark.slow
def test_turns_of_a_conversation_are_spans_and_a_reward_that_gave_none_says_so(
    mlflow_client: Any, tracked: dict[str, Any], tmp_path: Path
) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    said = [
        {"role": "assistant", "content": "I add.", "tool_calls": [call]},
        {"role": "tool", "name": "add", "content": "2"},
        {"role": "assistant", "content": "two"},
    ]
    told = {"conversation": json.dumps(said), "opening": "", "turns": 2}
    write_sampled(tmp_path, [[sampled(1, 0, {"numeric_match": None}, **told) for _ in range(G)]], G)
    send_rest_of_rollouts(tracked, tmp_path, _config(1), LOG)
    [found] = traces_of(tracked)
    assert [(span.name, span.span_type) for span in found.data.spans] == [
        ("rollout, update 1", "CHAT_MODEL"),
        ("policy", "LLM"),
        ("add", "TOOL"),
        ("policy", "LLM"),
    ]
    assert [span.parent_id for span in found.data.spans] == [None, *[found.data.spans[0].span_id] * 3]
    assert found.info.response_preview == "two"
    [given_none] = found.info.assessments
    assert (given_none.value, given_none.error.error_message) == (None, "the reward gave None")


class _Killed(Exception):
    pass


@pytest.mark.slow
@pytest.mark.parametrize("writes", [1, 5, 9, *(pytest.param(n, marks=pytest.mark.e2e) for n in (0, 4, 7))])
def test_a_sender_killed_after_any_write_doubles_and_loses_nothing(
    mlflow_client: Any, tracked: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes: int
) -> None:
    """`writes`: that are done before the process dies: four traces and their spans per batch, each way one write."""
    write_sampled(tmp_path, [_batch(1), _batch(2)], G)
    for number, file in enumerate(sorted((tmp_path / "completions").iterdir())):
        os.utime(file, (1000 + number, 1000 + number))
    done = 0

    def dying(write: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            nonlocal done
            if done == writes:
                raise _Killed
            done += 1
            return write(*arguments, **keywords)

        return call

    with monkeypatch.context() as patch:
        for name in ("start_trace", "log_spans"):
            patch.setattr(TracingClient, name, dying(getattr(TracingClient, name)))
        send_rest_of_rollouts(tracked, tmp_path, _config(), LOG)
    assert done == writes
    send_rest_of_rollouts(tracked, tmp_path, _config(), LOG)
    once = _content(traces_of(tracked))
    assert len(once) == 8
    assert all(len(spans) == 1 and len(assessments) == 1 for *_, assessments, spans in once)
    (tmp_path / module.TRACED_FILE).write_text("")  # as a machine that dies may leave it
    send_rest_of_rollouts(tracked, tmp_path, _config(), LOG)
    assert _content(traces_of(tracked)) == once


@pytest.mark.slow
def test_traces_are_sent_while_a_training_runs_and_of_a_batch_sampled_again_the_newer_rows(
    mlflow_client: Any, tracked: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SECONDS_BETWEEN_BATCHES", 0.01)
    monkeypatch.setattr(module, "SHARE", 1.0)
    monkeypatch.setattr(module, "LAST_SECONDS", 120.0)
    with tracing(tmp_path, tracked, _config(), LOG):
        write_sampled(tmp_path, [_batch(1)], G)
        wait_for((tmp_path / module.TRACED_FILE).exists)
        write_sampled(tmp_path, [[*_batch(1), *_batch(3)]], G)
    steps = [trace.info.tags["step"] for trace in traces_of(tracked)]
    assert sorted(steps) == ["1"] * 4 + ["3"] * 4


@pytest.mark.parametrize("text", EVIL)
def test_tags_and_names_have_no_character_that_a_database_refuses(text: str) -> None:
    turns = [{"role": "tool", "name": text, "content": "2"}, {"role": "assistant", "content": "two"}]
    told = module.Told("it", [1], "1+1=", turns, (1, 1), {}, {"category": text}, 1, "run")
    names = [span.name for span in module._spans(told)]
    for shown in (module._info(told, "0").tags["category"], *names):
        assert not UNSHOWN.search(shown)


@given(st.lists(st.floats(0.001, 30.0), min_size=1, max_size=8))
def test_while_a_training_runs_traces_take_at_most_their_share_of_the_time(seconds: list[float]) -> None:
    """The clock moves while the thread waits, and by `seconds` while it sends each batch."""
    now, pauses, left = [0.0], list[float](), [*seconds]

    def wait(pause: float) -> None:
        pauses.append(pause)
        now[0] += pause

    def send_batch(*_: object) -> None:
        now[0] += left.pop(0)

    ended: Any = SimpleNamespace(wait=wait, is_set=lambda: not left)
    with (
        mock.patch.object(module, "time", SimpleNamespace(monotonic=lambda: now[0])),
        mock.patch.object(module, "_unsent", lambda _: [(None, None)]),
        mock.patch.object(module, "_spread", lambda _: []),
        mock.patch.object(module, "_send_batch", send_batch),
    ):
        module._follow(Path(), {}, _config(), LOG, ended, threading.Event())
    assert len(pauses) == len(seconds) + 1
    for worked, pause in zip(seconds, pauses[1:], strict=True):
        assert worked <= 0.01 * pause * (1 + 1e-9)


def test_batches_that_wait_are_listed_once_and_not_before_each() -> None:
    files, listed, sent = [(number, Path(f"{number}")) for number in range(50)], list[int](), list[Path]()

    def unsent(_: Path) -> list[tuple[int, Path]]:
        listed.append(len(sent))
        return files[len(sent) :]

    ended: Any = SimpleNamespace(wait=lambda _: None, is_set=lambda: len(sent) == len(files))
    with (
        mock.patch.object(module, "_unsent", unsent),
        mock.patch.object(module, "_send_batch", lambda file, *_: sent.append(file)),
    ):
        module._follow(Path(), {}, _config(), LOG, ended, threading.Event())
    assert sent == [file for _, file in files]
    assert listed == [0, 50]  # and at the end


@pytest.mark.slow
def test_no_failure_of_traces_ends_a_training_and_zero_sends_none(
    tracked: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_sampled(tmp_path, [_batch(1)], G)
    monkeypatch.setattr(module, "send", lambda *_: pytest.fail("asked for none"))
    with tracing(tmp_path, tracked, _config(0), LOG):
        pass
    send_rest_of_rollouts(tracked, tmp_path, _config(0), LOG)

    def refuse(*_: object) -> None:
        raise OSError(111, "Connection refused")

    monkeypatch.setattr(module, "send", refuse)
    with tracing(tmp_path, tracked, _config(), LOG):
        pass
    send_rest_of_rollouts(tracked, tmp_path, _config(), LOG)
    assert [it.getMessage() for it in caplog.records if it.levelno >= logging.WARNING] == [
        "MLflow does not accept rollouts as traces; trying again: Connection refused",
        "MLflow does not accept rollouts as traces: Connection refused",
    ]
    assert not (tmp_path / module.TRACED_FILE).exists()


def _hidden(text: str) -> list[str]:
    """Pictures, and links whose words are not their address, of the text as MLflow renders it: without tags."""
    found = []
    for block in MarkdownIt("commonmark", {"html": False}).parse(text):
        for token, following in itertools.pairwise([*(block.children or ()), None]):
            address = str(token.attrs.get("href", "")) if token else ""
            if token.type == "image" or address.removeprefix("mailto:") != (following.content if address else ""):
                found.append(token.type)
    return found


LINKS = st.text("![]()<>:/\\ \n>-*`\"'&#104;htp.eva", max_size=60)


@pytest.mark.slow
@settings(max_examples=300)
@given(text=LINKS | st.tuples(LINKS, st.sampled_from(EVIL[:7]), LINKS).map("".join))
def test_no_link_of_a_trace_hides_where_it_leads(text: str) -> None:
    assert not _hidden(_text(text))


def test_a_trace_shows_images_as_content_parts_in_openai_s_form(
    mlflow_client: Any, tracked: dict[str, Any], tmp_path: Path
) -> None:
    """MLflow's page draws these. Rows of text alone stay text."""
    evil = "![x](http://127.0.0.1/x.png)"
    pictures = [picture(30, 20), picture(900, 600)]
    rows = [{"image": png(it), "height": it.height, "width": it.width, "tokens": 1, "grid": None} for it in pictures]
    (tmp_path / "dataset").mkdir()
    pq.write_table(pa.Table.from_pylist(rows, FILE), tmp_path / "dataset" / "images.parquet")
    said = [f"{MARK}{evil}{MARK}", "text"]
    asked = [[{"role": "system", "content": "Look."}, {"role": "user", "content": it}] for it in said]
    batches = [
        [sampled(1, row, {"numeric_match": 0.0}, prompt=asked[row], images=[[1, 0], []][row]) for _ in range(G)]
        for row in range(2)
    ]
    write_sampled(tmp_path / "training", batches, G)
    send_rest_of_rollouts(tracked, tmp_path / "training", _config(1), LOG)
    found = {trace.info.tags["row"]: trace for trace in traces_of(tracked)}
    system, user = found["0"].data.spans[0].inputs["messages"]
    assert system["content"] == "Look."
    first, text, second = user["content"]
    for part, size in ((first, (320, 213)), (second, (30, 20))):
        assert part["type"] == "image_url" and len(part["image_url"]["url"]) <= 20_000
        content = base64.b64decode(part["image_url"]["url"].partition(";base64,")[2], validate=True)
        assert Image.open(io.BytesIO(content)).size == size
    assert text == {"type": "text", "text": _text(evil)} and not _hidden(text["text"])
    assert found["0"].info.request_preview == f"Look.\n[image]{evil}[image]"
    assert found["1"].data.spans[0].inputs["messages"][1]["content"] == "text"
    (tmp_path / "dataset" / "images.parquet").unlink()
    assert [it["type"] for it in module._content(said[0], iter([]))] == ["text"] * 3


@pytest.mark.slow
def test_hostile_texts_are_kept_as_text_of_a_limited_length(
    mlflow_client: Any, tracked: dict[str, Any], tmp_path: Path
) -> None:
    batches = [
        [sampled(1, row, {"numeric_match": 0.0}, prompt=text, completion=text) for _ in range(G)]
        for row, text in enumerate(EVIL)
    ]
    write_sampled(tmp_path, batches, G)
    send_rest_of_rollouts(tracked, tmp_path, _config(1), LOG)
    found = {trace.info.tags["row"]: trace for trace in traces_of(tracked)}
    for row, text in enumerate(EVIL):
        trace = found[str(row)]
        [span] = trace.data.spans
        [message] = span.outputs["messages"]
        assert message["content"].replace("]\\", "]") == shortened(text, LONGEST_TEXT)
        assert not _hidden(message["content"])
        assert not UNSHOWN.search(span.outputs["messages"][0]["content"])
        shown = trace.info.response_preview
        assert len(shown) <= LONGEST_PREVIEW and shown == shortened(text, LONGEST_PREVIEW - 50)[:LONGEST_PREVIEW]


@pytest.mark.parametrize("count", [0, 1, 24, 25, 26, 51, 1000])
def test_at_the_end_few_batches_are_sent_evenly_and_the_last_is_among_them(count: int) -> None:
    waiting = [(number, Path(str(number))) for number in range(count)]
    numbers = [number for number, _ in _spread(waiting)]
    assert not count or numbers[-1] == count - 1
    assert len(numbers) <= MOST_AT_END and (count > MOST_AT_END or len(numbers) == count)
    assert len({later - earlier for earlier, later in itertools.pairwise(numbers)}) <= 1
