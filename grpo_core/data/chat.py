"""Text or messages: a prompt is a text or a list of messages {role, content}, a completion a text or one message.

The one place that tells the two apart. Columns of such prompts are told apart by their Arrow type, where data is
validated.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

ROLES = ("system", "user", "assistant", "tool")
MARK = "pageturn"  # of letters only: templates may trim, quote or check what stands for a name
NO_OPTIONS: Mapping[str, Any] = {}


def is_conversation(prompt: Any) -> bool:
    """True if a prompt, or a completion, is a list of messages, not a text."""
    return not isinstance(prompt, str)


def text_of(completion: str | Sequence[Mapping[str, str]]) -> str:
    """The text of a completion: itself, or the content of its last message."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def completion_of(prompt: Any, text: str) -> Any:
    """A text as a completion of the prompt, as rewards see it: itself, or one message of the assistant."""
    return [{"role": "assistant", "content": text}] if is_conversation(prompt) else text


def turns(prompt: Any) -> list[tuple[str, str]]:
    """(role, text) of each message, tool calls as JSON; of a prompt that is text, one turn without a role."""
    if not is_conversation(prompt):
        return [("", prompt)]
    return [(message["role"], _message_text(message)) for message in without_gaps(prompt)]


def _message_text(message: Mapping[str, Any]) -> str:
    calls = [json.dumps(call.get("function", call), ensure_ascii=False) for call in message.get("tool_calls", [])]
    return "\n".join(part for part in (message.get("content"), *calls) if part)


def plain(prompt: Any) -> Any:
    """The prompt; messages only with the fields that every data set has."""
    return [{"role": role, "content": text} for role, text in turns(prompt)] if is_conversation(prompt) else prompt


def without_gaps(conversation: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages without their null fields: Arrow gives every message, and every tool call's arguments, each key that any
    of them has."""
    return [_without_nulls(message) for message in conversation]


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def as_written(content: str, text: str) -> str | None:
    """The content in the form in which a chat template has written it into the text; None if it has not. Some trim it,
    some quote it as JSON."""
    for form in (content, content.strip()):
        if form in text:
            return form
    quoted = json.dumps(content, ensure_ascii=False)[1:-1]
    return quoted if quoted in text else None


def marks(contents: Sequence[str]) -> Iterator[str]:
    """Texts that are in none of the contents, nor in each other."""
    found = (f"{MARK}{'x' * count}z" for count in itertools.count())
    return (mark for mark in found if not any(mark in content for content in contents))


def first_unwritten(
    messages: Sequence[Mapping[str, Any]], render: Callable[[Sequence[Mapping[str, Any]]], str]
) -> int | None:
    """Index of the first message of system, user or tool whose content a chat template does not write; None if it
    writes all. Marks stand in their place: a template may read a switch, such as "/no_think", out of a text.
    `render`: gives the template's text."""
    contents = [str(message.get("content") or "") for message in messages]
    places = [place for place, it in enumerate(messages) if it["role"] != "assistant" and contents[place].strip()]
    own = dict(zip(places, marks(contents), strict=False))
    text = render([{**it, "content": own[place]} if place in own else it for place, it in enumerate(messages)])
    return next((place for place, mark in own.items() if mark not in text), None)


def encode_prompts(prompts: Sequence[Any], tokenizer: Any, options: Mapping[str, Any] = NO_OPTIONS) -> list[list[int]]:
    """Token ids of standard (text) or conversational prompts, the latter through the chat template; `options`: its
    variables, and the `tools` that it shows."""
    if not is_conversation(prompts[0]):
        return tokenizer(list(prompts), return_attention_mask=False, return_token_type_ids=False)["input_ids"]
    conversations = [without_gaps(prompt) for prompt in prompts]
    return tokenizer.apply_chat_template(conversations, add_generation_prompt=True, return_dict=True, **options)[
        "input_ids"
    ]


def end_token_problem(tokenizer: Any, prompt: Any) -> str:
    """The problem if the tokenizer puts its end token after a prompt that is text; "" if it does not.

    A chat template may end a conversation with that token, which belongs to the format that the model was trained on.
    """
    if is_conversation(prompt):
        return ""
    ids, bare = (tokenizer(prompt, add_special_tokens=special)["input_ids"] for special in (True, False))
    end = tokenizer.eos_token_id
    if ids[-1:] != [end] or bare[-1:] == [end]:
        return ""
    return (
        f"the tokenizer {tokenizer.name_or_path!r} puts its end token {tokenizer.eos_token!r} after each prompt: "
        "completions would begin after the end of the text. In a copy of the model's folder, set add_eos_token to "
        "false in tokenizer_config.json, or remove the token from post_processor in tokenizer.json"
    )


def begin_token_problem(tokenizer: Any, prompt: Any) -> str:
    """The problem if a prompt that is text begins with the begin token, as one rendered by a chat template, and the
    tokenizer puts another before it; "" if not."""
    begin = tokenizer.bos_token_id
    if is_conversation(prompt) or begin is None or tokenizer(prompt)["input_ids"][:2] != [begin, begin]:
        return ""
    return (
        f"the tokenizer {tokenizer.name_or_path!r} puts its begin token before each prompt, and the prompt "
        f"{prompt[:40]!r} begins with {tokenizer.bos_token!r}: the model would read it twice, unlike in what it was "
        "trained on. Remove it from the beginning of the prompts, or give messages, which the chat template renders"
    )


def decode_completions(
    rows: Sequence[Mapping[str, Any]],
    prompt_ids: Sequence[list[int]],
    ids: Sequence[list[int]],
    tokenizer: Any,
    stop: Sequence[str] = (),
) -> list[Any]:
    """Completions as rewards see them: one assistant message if the prompt is a conversation, else the text that
    continues the prompt; without the texts of `stop` and what comes after them."""
    texts = _decode(rows, prompt_ids, ids, tokenizer)
    return [completion_of(row["prompt"], _before_stop(text, stop)) for row, text in zip(rows, texts, strict=True)]


def _before_stop(text: str, stop: Sequence[str]) -> str:
    """The part of a text before the first of the texts in `stop`."""
    return text[: min((at for each in stop if (at := text.find(each)) >= 0), default=len(text))]


def _decode(
    rows: Sequence[Mapping[str, Any]], prompt_ids: Sequence[list[int]], ids: Sequence[list[int]], tokenizer: Any
) -> list[str]:
    if not rows or is_conversation(rows[0]["prompt"]):
        return tokenizer.batch_decode(ids, skip_special_tokens=True)
    # Decoded alone, a completion loses its leading space with tokenizers that put one in front of every text.
    prompts = {tuple(prompt): prompt for prompt in prompt_ids}
    shown = tokenizer.batch_decode([*prompts.values()], skip_special_tokens=True)
    before = dict(zip(prompts, shown, strict=True))
    together = [prompt + completion for prompt, completion in zip(prompt_ids, ids, strict=True)]
    whole = tokenizer.batch_decode(together, skip_special_tokens=True)
    # Bytes at the prompt's end that are not a character alone may be one together with the completion's first bytes.
    return [
        text.removeprefix(before[tuple(prompt)])
        if text.startswith(before[tuple(prompt)])
        else tokenizer.decode(own, skip_special_tokens=True)
        for prompt, text, own in zip(prompt_ids, whole, ids, strict=True)
    ]
