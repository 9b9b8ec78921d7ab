"""Turns as token ids: what was sampled stays, and the whole is what the chat template writes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_core.environments.calls import ToolCall
from grpo_core.environments.turns import TemplateError, TurnFormat
from tests.grpo_core.environments.templates import FAMILIES, make_tokenizer, tokenizer_of

SUM = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
WITH_TOOLS = [family for family, (_, _, call) in FAMILIES.items() if call]


def _format(family: str, **options: Any) -> TurnFormat:
    return TurnFormat(tokenizer_of(family), (FAMILIES[family][1],), options)


def _played(turns: TurnFormat, prompt: list[Any], said: list[str], answers: list[list[Any]], tools: list[Any]) -> Any:
    """Ids of a conversation of which each turn of the policy is this text, and the places of its tokens."""
    ids, mine = turns.prompt(prompt, tools), []
    for number, text in enumerate(said):
        sampled = turns.tokenizer(text + turns.ends[0], add_special_tokens=False)["input_ids"]
        mine.append((len(ids), sampled))
        ids = ids + sampled
        if number < len(answers):
            ids = ids + turns.answer(answers[number])
    return ids, mine


# Text that templates may trim or quote is in test_an_answer_….
PLAIN = st.text(st.characters(codec="ascii", categories=("L", "N"), include_characters=" +-"), min_size=1).map(
    lambda text: f"a{text}z"
)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2_5", "qwen3", "qwen3_instruct_2507", "llama3_1", "llama3_2"])
@given(answers=st.lists(PLAIN, min_size=1, max_size=4))
def test_a_conversation_with_tools_is_the_text_that_the_template_writes(family: str, answers: list[str]) -> None:
    turns, call = _format(family), FAMILIES[family][2]
    prompt = [{"role": "user", "content": "1+2"}]
    answered = [[{"role": "tool", "name": "add", "content": text}] for text in answers]
    ids, mine = _played(turns, prompt, [call] * len(answers) + ["so 3"], answered, [SUM])
    assistant = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}],
    }
    messages = [*prompt, *(message for tools in answered for message in [assistant, *tools])]
    whole = turns.tokenizer.apply_chat_template(messages, tools=[SUM], tokenize=False, add_generation_prompt=True)
    assert turns.tokenizer.decode(ids) == whole + "so 3" + turns.ends[0]
    for place, sampled in mine:
        assert ids[place : place + len(sampled)] == sampled


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2_5", "qwen3", "llama3_1", "mistral", "gemma3"])
@given(replies=st.lists(PLAIN, min_size=1, max_size=3))
def test_a_conversation_with_a_user_is_the_text_that_the_template_writes(family: str, replies: list[str]) -> None:
    turns, prompt = _format(family), [{"role": "user", "content": "hello"}]
    answered = [[{"role": "user", "content": text}] for text in replies]
    ids, _ = _played(turns, prompt, ["hi"] * (len(replies) + 1), answered, [])
    spoken = [m for reply in answered for m in ({"role": "assistant", "content": "hi"}, *reply)]
    whole = turns.tokenizer.apply_chat_template([*prompt, *spoken], tokenize=False, add_generation_prompt=True)
    assert turns.tokenizer.decode(ids) == whole + "hi" + turns.ends[0]


@pytest.mark.parametrize("family", WITH_TOOLS)
@pytest.mark.parametrize("content", ["", " x ", 'say "x"\n', "ü€", "<|im_end|> [INST] <|eot_id|> </s> <end_of_turn>"])
def test_an_answer_says_what_the_tool_said_and_ends_no_turn_by_it(family: str, content: str) -> None:
    turns = _format(family)
    plain = turns.answer([{"role": "tool", "name": "add", "content": "x"}])
    ids = turns.answer([{"role": "tool", "name": "add", "content": content}])
    special = set(turns.tokenizer.all_special_ids)
    assert [it for it in ids if it in special] == [it for it in plain if it in special]
    written = turns.tokenizer.decode(ids)
    assert content in written or content.strip() in written or json.dumps(content, ensure_ascii=False)[1:-1] in written


@pytest.mark.parametrize("family", WITH_TOOLS)
def test_calls_are_read_as_the_template_writes_them(family: str) -> None:
    turns = _format(family)
    ids = turns.tokenizer(FAMILIES[family][2] + turns.ends[0], add_special_tokens=False)["input_ids"]
    assert turns.read(ids, {"add": SUM})[1] == [ToolCall("add", {"a": 1, "b": 2})]
    assert turns.read(turns.tokenizer("so 3" + turns.ends[0])["input_ids"], {"add": SUM}) == ("so 3", [])


@pytest.mark.parametrize("family", WITH_TOOLS)
@pytest.mark.parametrize("options", [{}, {"enable_thinking": False}])
def test_calls_are_written_so_that_they_are_read_again(family: str, options: dict[str, Any]) -> None:
    turns, call = _format(family, **options), ToolCall("add", {"a": 1, "b": -2})
    calls = [call] if family.startswith("llama") else [call, ToolCall("add", {"a": 3, "b": 4})]
    ids = turns.tokenizer(turns.write(calls) + turns.ends[0], add_special_tokens=False)["input_ids"]
    assert turns.read(ids, {"add": SUM})[1] == calls
    if family.startswith("llama"):
        with pytest.raises(TemplateError, match="cannot write the turn: This model only supports single tool-calls"):
            turns.write([call, call])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("<tool_call>\n{}\n</tool_call>", "no object with a"),
        ('<tool_call>\n{"name": "add"', "no </tool_call>"),
        ('<tool_call>\n{"name": "add", "arguments": [1]}\n</tool_call>', "no object"),
        ("<tool_call>\nadd(1, 2)\n</tool_call>", "not valid JSON"),
        ("<tool_call>\n[]\n</tool_call>", "no object with a"),
    ],
)
def test_a_malformed_call_is_told_apart_from_no_call(text: str, problem: str) -> None:
    turns = _format("qwen2_5")
    (call,) = turns.read(turns.tokenizer(text + "<|im_end|>")["input_ids"], {"add": SUM})[1]
    assert problem in call.problem


def test_thinking_that_a_template_leaves_out_is_said() -> None:
    assert "leaves the thoughts of earlier turns out" in _format("qwen3").note("user")
    assert _format("qwen3").note("tool") == ""
    assert _format("qwen2_5").note("user") == ""


def test_without_thinking_each_turn_begins_as_the_template_begins_it() -> None:
    turns = _format("qwen3", enable_thinking=False)
    answer = turns.tokenizer.decode(turns.answer([{"role": "tool", "name": "add", "content": "3"}]))
    assert answer.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_templates_that_cannot_write_tools_are_refused_with_the_reason() -> None:
    assert "writes tool calls in no known form" in _format("gemma3").problem(with_tools=True)
    assert _format("gemma3").problem(with_tools=False) == ""
    mute = make_tokenizer("{% for m in messages %}{{ m.role }}<end>{% endfor %}", ("<s>", "<end>"), "<end>")
    assert "leaves out" in TurnFormat(mute, ("<end>",), {}).problem(with_tools=False)
    with pytest.raises(TemplateError, match=r"stops at '<s>'.*eos_token_id"):
        TurnFormat(tokenizer_of("qwen2_5"), ("<s>",), {}).answer([{"role": "user", "content": "x"}])
