"""Demonstrations as token ids: what is trained is what the assistant says, and the end of its turn."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_core.environments.demonstrations import Demonstration, DemonstrationError, encode
from grpo_core.environments.turns import TemplateError, TurnFormat
from tests.conftest import make_tokenizer as make_characters
from tests.grpo_core.environments.templates import FAMILIES, format_of, known_to_trl, tokenizer_of
from tests.grpo_core.environments.test_turns import PLAIN, SUM

USER, SAID = {"role": "user", "content": "how much is 1+2"}, {"role": "assistant", "content": "so 3"}


def _format(family: str, **options: Any) -> TurnFormat:
    return TurnFormat(tokenizer_of(family), (FAMILIES[family][1],), options)


def _pieces(turns: TurnFormat, found: Demonstration) -> list[tuple[int, str]]:
    """The completion as texts that are trained (1), or not (0)."""
    pairs = zip(found.trained_tokens, found.completion_ids, strict=True)
    runs = [(mask, [ids for _, ids in own]) for mask, own in itertools.groupby(pairs, key=lambda pair: pair[0])]
    return [(mask, turns.tokenizer.decode(ids)) for mask, ids in runs]


def _call(a: int, b: int) -> dict[str, Any]:
    return {"type": "function", "id": "call00000", "function": {"name": "add", "arguments": {"a": a, "b": b}}}


THINKING = {"deepseek", "deepseekv3", "nemotron"}  # a thought is begun before the turn, and left out of what was said
# `format_of` finds no end of their turns, or they take no text as content.
WITHOUT_END = {"cohere", "gemma", "gemma3", "glm4moe", "gptoss", "idefics3", "llava", "smolvlm"}
SIMPLE = [family for family in FAMILIES if family not in ("glm4moe",)]  # which ends no turn by itself


@pytest.mark.parametrize("family", SIMPLE)
@given(said=st.lists(PLAIN, min_size=1, max_size=3), asked=PLAIN)
def test_of_any_conversation_the_assistants_texts_are_trained_with_their_ends_and_nothing_else(
    family: str, said: list[str], asked: str
) -> None:
    turns, user = _format(family), {"role": "user", "content": asked}
    messages = [message for text in said for message in (user, {**SAID, "content": text})]
    found = encode({"messages": messages}, turns, [])
    pieces = _pieces(turns, found)
    spoken = [re.sub(r"^<think>\s*</think>\s*", "", text) for mask, text in pieces if mask]
    assert spoken == [text + turns.ends[0] for text in said]
    assert all(asked in text for mask, text in pieces if not mask)
    whole = turns.tokenizer.decode(found.prompt_ids + found.completion_ids)
    first = turns.tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    assert turns.tokenizer.decode(found.prompt_ids) == first
    if family in ("qwen2_5", "llama3_1", "mistral", "gemma3"):  # whose templates change no earlier turn
        rendered = turns.tokenizer.apply_chat_template(messages, tokenize=False)
        assert rendered.startswith(whole) and not rendered.removeprefix(whole).strip()


@pytest.mark.parametrize("family", [family for family in SIMPLE if FAMILIES[family][2]])
@pytest.mark.parametrize("arguments", [dict, json.dumps], ids=["object", "as JSON"])
def test_tool_calls_are_trained_in_the_form_in_which_the_policy_is_read(family: str, arguments: Any) -> None:
    turns, call = _format(family), _call(1, 2)
    call["function"]["arguments"] = arguments(call["function"]["arguments"])
    asks = {"role": "assistant", "content": None, "tool_calls": [call]}
    answer = {"role": "tool", "name": "add", "tool_call_id": "call00000", "content": "it is 3"}
    found = encode({"messages": [USER, asks, answer, SAID], "tools": json.dumps([SUM])}, turns, [])
    (_, first), (_, between), (_, last) = _pieces(turns, found)
    ids = [id for id, mask in zip(found.completion_ids, found.trained_tokens, strict=True) if mask]
    made = turns.read(ids[: ids.index(turns.tokenizer.convert_tokens_to_ids(turns.ends[0])) + 1], {"add": SUM})[1]
    assert [(it.name, it.arguments) for it in made] == [("add", {"a": 1, "b": 2})]
    assert first.endswith(turns.ends[0]) and "it is 3" in between and last.endswith("so 3" + turns.ends[0])
    assert "Adds." in turns.tokenizer.decode(found.prompt_ids) or family == "mistral"
    assert found == encode({"messages": [USER, asks, answer, SAID]}, turns, [SUM])


def test_every_template_that_trl_knows_gives_exact_masks_or_says_why_not() -> None:
    refused = {}
    for family in known_to_trl():
        turns = format_of(family)
        try:
            found = encode({"messages": [USER, SAID, USER, {**SAID, "content": "again 3"}]}, turns, [])
        except TemplateError as error:
            refused[family] = str(error)
            continue
        said = [text for mask, text in _pieces(turns, found) if mask]
        assert len(said) == 2, family
        for text, wanted in zip(said, ("so 3", "again 3"), strict=True):
            assert wanted in text and any(text.endswith(end) for end in turns.ends), (family, said)
            assert sum(text.count(end) for end in {*turns.ends}) == 1, (family, said)
    assert {family.split("_")[0] for family, why in refused.items() if "could not say it so" in why} == THINKING
    others = {family for family, why in refused.items() if "set eos_token_id" in why or "leaves out message 0" in why}
    assert {family.split("_")[0] for family in others} == WITHOUT_END


CALLS = [_call(1, 2)]


@pytest.mark.parametrize(
    ("turn", "parts", "lost"),
    [
        ({**SAID, "content": "", "tool_calls": CALLS}, ("add",), ("llama3", "lfm2", "phi3_5", "cohere2", "qwen2_5_vl")),
        ({**SAID, "content": "I look", "tool_calls": CALLS}, ("I look", "add"), ("llama3", "llama3_1", "phi3")),
        ({**SAID, "content": "add", "tool_calls": CALLS}, ("add",), ("llama3", "llama3_1", "phi3", "qwen2_5_vl")),
        ({**SAID, "reasoning_content": "I add"}, ("I add", "so 3"), ("qwen2_5", "qwen3_instruct_2507", "llama3_1")),
        ({**SAID, "reasoning_content": "so 3"}, ("so 3",), ("qwen2_5", "phi3", "gemma4")),
        ({**SAID, "content": "", "reasoning": "I add"}, ("I add",), ("qwen2_5", "qwen3")),
        ({**SAID, "content": "<think>\nI add\n</think>\n\nso 3"}, ("I add", "so 3"), ()),
        ({**SAID, "thinking": True, "reasoning": {"effort": "low"}}, ("so 3",), ()),
        ({**SAID, "reasoning_content": "I add", "reasoning": "I add"}, ("I add", "so 3"), ("qwen2_5", "phi3")),
    ],
    ids=[
        "call",
        "text and call",
        "equal ones",
        "thought",
        "equal thought",
        "other name",
        "in the text",
        "settings",
        "twice",
    ],
)
def test_what_a_template_does_not_write_of_a_turn_is_never_left_out_silently(
    turn: dict[str, Any], parts: tuple[str, ...], lost: tuple[str, ...]
) -> None:
    written, refused = set(), {}
    for family in known_to_trl():
        turns = format_of(family)
        try:
            found = encode({"messages": [USER, turn]}, turns, [SUM])
        except TemplateError as error:
            refused[family] = str(error)
            continue
        ((trained, text),) = _pieces(turns, found)
        assert trained and all(part in text for part in parts), (family, text)
        written.add(family)
    assert len(written) > 10 or "qwen3" in lost
    for family in lost:
        assert "leaves out what the assistant says in" in refused[family], refused[family]
    if "reasoning" in turn and "qwen3" in lost:
        assert "name it `reasoning_content`" in refused["qwen3"]
        assert "write it into `content`" in refused["qwen2_5"]


@pytest.mark.parametrize("family", ["qwen2_5", "qwen3", "llama3_1", "mistral", "gemma4_v2", "phi3_5", "cohere2"])
def test_what_is_said_may_be_a_part_of_the_sign_that_ends_a_turn(family: str) -> None:
    """Such as the letter of an answer, and as the end token's own name."""
    turns = _format(family) if family in FAMILIES else format_of(family)
    for said in {*turns.ends[0], *re.findall("[a-zA-Z]+", turns.ends[0])}:
        found = encode({"messages": [USER, {**SAID, "content": said}]}, turns, [])
        ((trained, text),) = _pieces(turns, found)
        assert trained and re.sub(r"^<think>\s*</think>\s*", "", text) in {said + end for end in turns.ends}


def test_a_turn_that_spells_its_end_in_an_argument_or_a_thought_is_refused() -> None:
    end, call = "<|im_end|>", _call(1, 2)
    call["function"]["arguments"]["a"] = f"by {end}"
    for turn in ({**SAID, "tool_calls": [call]}, {**SAID, "reasoning_content": f"by {end}"}):
        with pytest.raises(TemplateError, match=r"has '<\|im_end\|>' in its middle, at which the model stops: leave"):
            encode({"messages": [USER, turn]}, _format("qwen3"), [SUM])


def test_a_message_that_the_template_does_not_write_is_refused() -> None:
    turns = _format("qwen2_5")
    turns.tokenizer.chat_template = (
        "{% for m in messages if m.role != 'system' %}<|im_start|>{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant: {% endif %}"
    )
    assert encode({"messages": [USER, SAID]}, turns, []).completion_ids
    with pytest.raises(TemplateError, match=r"leaves out message 0, the system's: 'in verse'"):
        encode({"messages": [{"role": "system", "content": "in verse"}, USER, SAID]}, turns, [])


def test_a_special_token_that_a_text_spells_out_ends_no_turn() -> None:
    turns = _format("qwen2_5")
    found = encode({"messages": [USER, {**SAID, "content": "say <|im_end|> to end"}]}, turns, [])
    end = turns.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert found.completion_ids.count(end) == 1 and found.completion_ids[-1] == end
    assert _pieces(turns, found) == [(1, "say <|im_end|> to end<|im_end|>")]


def test_a_completion_of_messages_alone_is_trained_and_the_prompts_own_turns_are_not() -> None:
    turns = _format("qwen2_5")
    prompt, more = [USER, SAID, {**USER, "content": "and 2+2"}], {**SAID, "content": "4"}
    for completion in ("4", [more]):
        found = encode({"prompt": prompt, "completion": completion}, turns, [])
        assert _pieces(turns, found) == [(1, "4<|im_end|>")]
        assert "so 3<|im_end|>" in turns.tokenizer.decode(found.prompt_ids)
    all_of_them = encode({"messages": [*prompt, more]}, turns, [])
    assert [mask for mask, _ in _pieces(turns, all_of_them)] == [1, 0, 1]


def test_a_text_ends_by_the_end_token_or_by_a_text_that_stops_sampling() -> None:
    tokenizer = make_characters()
    turns = TurnFormat(tokenizer, (tokenizer.eos_token,), {})
    found = encode({"prompt": "1+2=", "completion": "3"}, turns, [])
    assert found.prompt_ids == tokenizer("1+2=")["input_ids"]
    assert found.completion_ids == [*tokenizer("3")["input_ids"], tokenizer.eos_token_id]
    assert found.trained_tokens == [1, 1]
    assert encode({"prompt": "1+2=", "completion": "3="}, turns, [], stop=["="]).completion_ids[-1] != 0
    assert len(encode({"prompt": "1+2=", "completion": "3="}, turns, [], stop=["="]).completion_ids) == 2


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"messages": [USER]}, "no turn of the assistant"),
        ({"messages": [SAID, USER, SAID]}, "begins with the assistant"),
        ({"messages": [USER, SAID, SAID]}, "messages 1 and 2 are both the assistant's"),
        ({"messages": [USER, {"content": "x"}]}, "not objects with `role`"),
        ({"messages": [USER, {**SAID, "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]}, "are no JSON"),
        ({"messages": None, "prompt": "x"}, "no text in the column"),
        ({"messages": [USER, {**SAID, "tool_calls": ["f"]}]}, "the call 'f' has no function with a `name`"),
        ({"messages": [USER, {**SAID, "tool_calls": {"arguments": "x"}}]}, "has no function with a `name`"),
        ({"messages": [USER, SAID], "tools": "{no"}, "no list of JSON schemas: '{no'"),
        ({"messages": [USER, SAID], "tools": "[1]"}, "no list of JSON schemas: '[1]'"),
        ({"prompt": "x", "completion": [SAID]}, "its prompt is a text, and its completion is not"),
        ({"prompt": "x", "completion": 3}, "its completion is not: 3;"),
        ({"prompt": "x", "completion": " \n"}, "no text in the column"),
        ({"messages": [USER, {**SAID, "content": " "}]}, "message 1, the assistant's, says nothing"),
        ({"messages": [USER, {**SAID, "content": None}]}, "message 1, the assistant's, says nothing"),
        ({"messages": [USER, {**SAID, "weight": 0}]}, "message 1, the assistant's, is marked as not trained"),
        ({"messages": [USER, {**SAID, "train": False}]}, "message 1, the assistant's, is marked as not trained"),
        ({"messages": [USER, {**SAID, "train": 0}]}, "message 1, the assistant's, is marked as not trained"),
        ({"messages": [USER, {**SAID, "weight": "0"}]}, "message 1, the assistant's, is marked as not trained"),
        ({"messages": [{"role": "developer", "content": "x"}, USER, SAID]}, "message 0 has the role 'developer': name"),
        ({"messages": [USER, SAID, {"role": "human", "content": "x"}, SAID]}, "message 2 has the role 'human': name"),
        ({"messages": [{"role": "user"}, SAID]}, "message 0, the user's, says nothing"),
        ({"messages": [{**USER, "content": [{"type": "image"}]}, SAID]}, "no text, nor a list of parts of text"),
        ({"messages": [{**USER, "content": {"text": "x"}}, SAID]}, "no text, nor a list of parts of text"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_row_that_shows_nothing_is_refused(row: dict[str, Any], said: str) -> None:
    with pytest.raises(DemonstrationError, match=re.escape(said)):
        encode(row, _format("qwen2_5"), [])


@pytest.mark.parametrize("family", ["qwen2_5", "llama3_1"])
def test_contents_in_parts_are_their_text_and_a_call_may_have_no_arguments(family: str) -> None:
    turns = _format(family)

    def parts(message: dict[str, Any]) -> dict[str, Any]:
        text = message["content"]
        return {**message, "content": [{"type": "text", "text": text[:2]}, {"type": "text", "text": text[2:]}]}

    messages = [USER, SAID, {**USER, "content": "and 2+2"}, {**SAID, "content": "4", "weight": 1}]
    assert encode({"messages": [*map(parts, messages)]}, turns, []) == encode({"messages": messages}, turns, [])
    prompt, completion = [parts(USER)], [parts(SAID)]
    assert encode({"prompt": prompt, "completion": completion}, turns, []) == encode(
        {"messages": [USER, SAID]}, turns, []
    )
    functions = [{"function": {"name": "f", "arguments": given}} for given in ("", "{}")]
    called = [{**SAID, "content": "", "tool_calls": [function]} for function in functions]
    empty, none = (encode({"messages": [USER, message]}, turns, [SUM]) for message in called)
    assert empty == none


def test_a_turn_without_an_end_token_and_one_in_another_place_are_refused() -> None:
    with pytest.raises(TemplateError, match=r"ends the policy's turn by .* set eos_token_id"):
        encode({"messages": [USER, SAID]}, _format("glm4moe"), [])
    turns = _format("qwen2_5")
    turns.tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}assistant (thinking): {% endif %}"
    )
    with pytest.raises(TemplateError, match="the policy could not say it so"):
        encode({"messages": [USER, SAID]}, turns, [])
