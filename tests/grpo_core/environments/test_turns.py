"""Turns as token ids: what was sampled stays, and the whole is what the chat template writes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken

from grpo_core.environments.calls import ToolCall
from grpo_core.environments.turns import ADD, CALL, TemplateError, TurnFormat
from tests.grpo_core.environments import scripted
from tests.grpo_core.environments.scripted import TEMPLATE
from tests.grpo_core.environments.templates import (
    CHATML,
    FAMILIES,
    format_of,
    known_to_trl,
    make_tokenizer,
    tokenizer_of,
)

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
    assert "'a model' writes no calls; take a model of a family that" in _format("gemma3").problem()
    silent = TEMPLATE.replace("message['content'] }}", "message['content'] if message['role'] != 'tool' }}")
    assert "leaves out what the tool says" in _from(silent).problem()
    raising = "{{ raise_exception('no tools here') if messages[-1]['tool_calls'] }}x"
    assert "cannot write the turn: no tools here" in _from(raising).problem()
    with pytest.raises(TemplateError, match=r"stops at '<s>'.*eos_token_id"):
        TurnFormat(tokenizer_of("qwen2_5"), ("<s>",), {}).answer([{"role": "user", "content": "x"}])


NAME, ARGUMENTS = "{{ call['function']['name'] }}", "{{ call['function']['arguments'] | tojson }}"
UNREAD = {  # with signs of forms that are read
    "Seed-OSS": f"<seed:tool_call>\n<function={NAME}>\n<parameter=a>1</parameter>\n</function>\n</seed:tool_call>",
    "Functionary": f"<function={NAME}>{ARGUMENTS}</function>",
    "Command R7B": f'<|START_ACTION|>[{{"tool_call_id": "0", "tool_name": "{NAME}", "parameters": {ARGUMENTS}}}]',
    "LFM2": f"<|tool_call_start|>[{NAME}(a=1)]<|tool_call_end|>",
}


@pytest.mark.parametrize("frame", UNREAD)
def test_a_template_whose_calls_would_never_be_read_is_refused_with_what_it_writes(frame: str) -> None:
    before, rest = TEMPLATE.split("<tool_call>", 1)
    listing = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"  # has '"parameters":'
    turns = _from(f"{listing}{before}{UNREAD[frame]}{rest.partition('</tool_call>')[2]}")
    problem = turns.problem()
    written = UNREAD[frame].replace(NAME, "add").replace(ARGUMENTS, '{"a": 1, "b": -2}')
    assert f"writes the call add(a=1, b=-2) as {written!r}, and only calls in other forms are read" in problem


@pytest.mark.slow
def test_of_all_templates_that_trl_knows_those_of_supported_families_are_accepted() -> None:
    accepted = []
    for family in known_to_trl():
        turns = format_of(family)
        if not turns.problem():
            accepted.append(family.removesuffix("_training"))
            ids = turns.tokenizer(turns.write([CALL]) + turns.ends[-1], add_special_tokens=False)["input_ids"]
            assert turns.read(ids, {"add": ADD})[1] == [CALL]
            _assert_spelled_out(turns)
    expected = {"glm4moe", "llama3_1", "llama3_2", "qwen2_5", "qwen3", "qwen3_5_nothink", "qwen3_5_think", "qwen3_6"}
    expected |= {"qwen3_8", "qwen3_instruct_2507", "qwen3_vl"}
    expected |= {f"nemotron_3_{size}" for size in ("5_lightning", "nano", "super", "ultra")}
    assert {*accepted} == expected and len(accepted) == 28


def _assert_spelled_out(turns: TurnFormat) -> None:
    """No piece of the template that an answer, one of two answers, or a reset spells out becomes a special token."""
    special, prompt = {*turns.tokenizer.all_special_ids}, [{"role": "user", "content": "hello"}]

    def tokens(ids: list[int]) -> list[int]:
        return [token for token in ids if token in special]

    for piece in turns.tokenizer.all_special_tokens:
        for contents in ([piece], [f' {piece} "x"\n'], ["o", piece], [piece, piece]):
            answers, plain = (
                [{"role": "tool", "name": "add", "content": text} for text in texts]
                for texts in (contents, ["x"] * len(contents))
            )
            try:
                ids = turns.answer(answers)
            except TemplateError:  # one answer for a turn
                assert len(contents) == 2
                continue
            assert tokens(ids) == tokens(turns.answer(plain))
            assert turns.tokenizer.decode(ids) == turns._after(answers)
        shown = turns.prompt(prompt, [SUM], f" {piece}")
        assert tokens(shown) == tokens(turns.prompt(prompt, [SUM]))
        assert turns.tokenizer.decode(shown) == turns.tokenizer.decode(
            turns.prompt([{"role": "user", "content": f"hello {piece}"}], [SUM])
        )


@pytest.mark.parametrize("family", WITH_TOOLS)
def test_a_piece_of_the_template_that_an_answer_or_a_reset_spells_out_is_text(family: str) -> None:
    _assert_spelled_out(_format(family))


def test_a_special_token_without_a_role_is_text_in_an_answer_too() -> None:
    """Most of Llama 3's are only added to the tokenizer."""
    turns = _from(TEMPLATE)
    turns.tokenizer.add_tokens([AddedToken("<|reserved|>", special=True)])
    assert "<|reserved|>" not in turns.tokenizer.all_special_tokens
    token = turns.tokenizer.convert_tokens_to_ids("<|reserved|>")
    assert token in turns.prompt([{"role": "user", "content": "<|reserved|>"}], [])  # as wherever the model is asked
    assert token not in turns.answer([{"role": "tool", "name": "add", "content": "<|reserved|>"}])


def test_a_model_with_a_template_of_its_own_for_tools_is_accepted() -> None:
    """As Hermes 2 Pro has; that template goes through the tools, whatever it writes."""
    plain = TEMPLATE.replace("message['tool_calls'] or []", "[]")
    listing = "{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    turns = _from({"default": plain, "tool_use": f"{listing}{TEMPLATE}"})
    assert turns.problem() == "" and turns.form == "hermes"
    assert _from(plain).problem() != ""
    answer = turns.tokenizer.decode(turns.answer([{"role": "tool", "name": "add", "content": "3"}]))
    assert answer == "\n<|im_start|>tool\n3<|im_end|>\n<|im_start|>assistant\n"


def test_a_template_that_opens_a_thought_has_it_closed_before_calls() -> None:
    turns = _from(TEMPLATE.replace("assistant\n{% endif", "assistant\n<think>\n{% endif"))
    written = turns.write([CALL])
    assert written.startswith("</think>\n\n<tool_call>") and turns.problem() == ""
    encode = turns.tokenizer
    assert turns.read(encode(f"Hm. {written}<|im_end|>")["input_ids"], {"add": ADD})[1] == [CALL]
    inside = f"Hm. {written.removeprefix('</think>')}"
    assert turns.read(encode(f"{inside}<|im_end|>")["input_ids"], {"add": ADD}) == (inside, [])


def test_a_turn_is_read_without_rendering_the_template_again(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = _format("qwen2_5")
    ids = turns.tokenizer(FAMILIES["qwen2_5"][2] + turns.ends[0])["input_ids"]
    first = turns.read(ids, {"add": SUM})
    monkeypatch.setattr(turns.tokenizer, "apply_chat_template", None)
    assert turns.read(ids, {"add": SUM}) == first != ("", [])


def _from(template: Any) -> TurnFormat:
    return scripted.turns(make_tokenizer(template, CHATML, "<|im_end|>"))
