"""Tool calls in text: what was meant arrives, and any other text is refused in a sentence."""

from __future__ import annotations

import json
import pickle
import re
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.utils import chat_template_utils

from grpo_core.environments.calls import FORMS, ToolCall, read_turn
from tests.grpo_core.environments.templates import make_tokenizer, template_of


def book(title: str, count: int, price: float, gift: bool, tags: list[str], note: str | None = None) -> str:
    """Orders books.

    Args:
        title: The title.
        count: How many.
        price: In euros.
        gift: Whether it is one.
        tags: Words.
        note: A word.
    """
    return ""


TOOLS = {"book": chat_template_utils.get_json_schema(book)}
WRITTEN = {"hermes": "qwen2_5", "xml": "qwen3_5_nothink", "glm": "glm4moe", "llama": "llama3_1", "mistral": "mistral"}
SIGNS = re.compile(r"</?(tool_call|function|parameter|arg_key|arg_value)|\[(TOOL_CALLS|ARGS|CALL_ID)")
LONG_TEXT_SECONDS = 2.0  # of CPU time: ten times what the slowest text takes
PLAIN = st.text(st.characters(codec="utf-8"), max_size=20).filter(lambda text: not SIGNS.search(text))


@pytest.mark.slow
@pytest.mark.parametrize("form", WRITTEN)
@given(
    title=PLAIN.map(lambda text: f"a{text}z"),
    count=st.integers(-(10**6), 10**6),
    price=st.floats(allow_nan=False, allow_infinity=False),
    gift=st.booleans(),
    tags=st.lists(PLAIN),
    note=st.sampled_from(["5", "true", "[1]", "{}"]),
)
def test_a_call_arrives_as_the_template_of_a_family_writes_it(form: str, **arguments: Any) -> None:
    call = {"id": "a1b2c3d4e", "type": "function", "function": {"name": "book", "arguments": arguments}}
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    tokenizer = make_tokenizer(template_of(WRITTEN[form]), ("<s>", "</s>"), "</s>")
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    written = text.partition("<|start_header_id|>assistant<|end_header_id|>\n\n")[2] if form == "llama" else text
    written = written.removesuffix("<|eot_id|>").removesuffix("</s>")
    assert read_turn(form, written, TOOLS)[1] == [ToolCall("book", arguments)]


PIECES = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "<function=", "</function>", "<parameter=", "</parameter>", ">", "<arg_key>"),
        *("</arg_key>", "<arg_value>", "</arg_value>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "book"),
        *(
            '{"name": "book", "arguments": ',
            '{"name": "book", "parameters": ',
            "{",
            "}",
            "[",
            "]",
            '"',
            ",",
            ":",
            "title",
        ),
        *("\\ud800", "1e999", "NaN", "9" * 5000, "[" * 3000, "[" * 500 + "]" * 500, '{"a":' * 300 + "1" + "}" * 300),
    ]
)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@given(text=st.lists(PIECES | st.text(max_size=5), max_size=12).map("".join))
def test_any_text_gives_calls_that_can_be_recorded_and_sent_or_what_is_wrong(form: str, text: str) -> None:
    said, calls = read_turn(form, text, TOOLS)
    for call in calls:
        json.dumps(call.message, ensure_ascii=False, allow_nan=False).encode()
        pickle.dumps(call.arguments)
        assert isinstance(call.name, str) and isinstance(call.arguments, dict) and (call.name or call.problem)
    assert said == text.strip() or any(not call.problem for call in calls)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_long_text_costs_time_in_proportion(form: str) -> None:
    """Much of what might begin something: minutes, if reading were quadratic."""
    for piece in PIECES.elements:  # type: ignore[attr-defined]
        text = piece * (3 * 10**5 // len(piece))
        for start in ("", "<tool_call>", "<tool_call><function=book>", "[TOOL_CALLS]", '{"name"'):
            begun = time.process_time()
            read_turn(form, start + text + "</function></tool_call>", TOOLS)
            assert time.process_time() - begun < LONG_TEXT_SECONDS, (piece[:20], start)


@pytest.mark.parametrize(
    ("form", "text", "problem"),
    [
        ("xml", "<tool_call>\n<function=book\n</tool_call>", "no <function=NAME>"),
        ("xml", "<tool_call><function=book><parameter=title>x</function></tool_call>", "'title' has no </parameter>"),
        ("xml", "<tool_call>\n<function=book>", "no </tool_call>"),
        ("glm", "<tool_call>book\n<arg_key>title</arg_key>x</tool_call>", "'title' has no <arg_value>"),
        ("glm", "<tool_call></tool_call>", "no name"),
        ("mistral", "[TOOL_CALLS]book{}", "not valid JSON"),
        ("hermes", '<tool_call>{"name": "book", "arguments": {"price": NaN}}</tool_call>', "holds NaN"),
        ("xml", "<tool_call><function=book><parameter=price>-Infinity</parameter></function></tool_call>", "holds NaN"),
        ("mistral", '[TOOL_CALLS][{"name": "book", "arguments": {"tags": [1e999]}}]', "beyond any float"),
    ],
)
def test_what_is_wrong_with_a_call_is_said(form: str, text: str, problem: str) -> None:
    said, (call,) = read_turn(form, f"Now: {text}", TOOLS)
    assert problem in call.problem and said == f"Now: {text}"


CALLS = {
    "hermes": '<tool_call>{"name": "book", "arguments": {"title": "<think>"}}</tool_call>',
    "xml": "<tool_call><function=book><parameter=title><think></parameter></function></tool_call>",
    "glm": "<tool_call>book<arg_key>title</arg_key><arg_value><think></arg_value></tool_call>",
    "mistral": '[TOOL_CALLS][{"name": "book", "arguments": {"title": "<think>"}}]',
    "llama": '{"name": "book", "parameters": {"title": "<think>"}}',
}


@pytest.mark.parametrize("form", FORMS)
def test_a_call_in_a_thought_is_none_and_the_text_around_calls_is_kept(form: str) -> None:
    call, made = CALLS[form], [ToolCall("book", {"title": "<think>"})]
    thought = f"<think>I could write {call} but no.</think>"
    assert read_turn(form, f"{thought} The answer is 3", TOOLS) == (f"{thought} The answer is 3", [])
    assert read_turn(form, "<think>Should I use <tool_call> or [TOOL_CALLS]?</think> 3", TOOLS)[1] == []
    assert read_turn(form, f"{thought}{thought}\n{call}", TOOLS) == (f"{thought}{thought}", made)
    assert read_turn(form, f"[THINK]{call}[/THINK]{call}", TOOLS) == (f"[THINK]{call}[/THINK]", made)
    assert read_turn(form, f"<think>never closed {call}", TOOLS)[1] == []
    assert read_turn(form, f"opened before {call}</think>{call}", TOOLS, "<think>")[1] == made
    assert read_turn(form, f"opened before {call}", TOOLS, "<think>")[1] == []
    if CALLS[form].endswith("</tool_call>"):
        assert read_turn(form, f"First {call}{call} and so on. ", TOOLS) == ("First  and so on.", made * 2)
        assert read_turn(form, f"a {call} b <tool_call></tool_call> c", TOOLS)[0] == "a  b <tool_call></tool_call> c"
