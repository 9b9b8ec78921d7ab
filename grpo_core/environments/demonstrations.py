"""A demonstration as token ids: what the policy shall say, in the tokens in which it would sample it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from grpo_core.data.chat import ROLES, is_conversation, without_gaps
from grpo_core.environments.turns import REASONING, TemplateError, TurnFormat

Message = dict[str, Any]
FORMS = "the column `messages`, or `prompt` and `completion`"


class DemonstrationError(ValueError):
    """Raised for a row that shows nothing that could be learnt; the message says why."""


@dataclass
class Demonstration:
    """Token ids of a demonstration. `trained_tokens`: 1 per token of the assistant, its end tokens included, and 0 per
    token of others."""

    prompt_ids: list[int]
    completion_ids: list[int] = field(default_factory=list)
    trained_tokens: list[int] = field(default_factory=list)

    def add(self, ids: Sequence[int], *, trained: bool) -> None:
        self.completion_ids += ids
        self.trained_tokens += [int(trained)] * len(ids)


def encode(
    row: Mapping[str, Any], turns: TurnFormat, tools: Sequence[Mapping[str, Any]], stop: Sequence[str] = ()
) -> Demonstration:
    """Encode a row with `messages`, or with `prompt` and `completion`, each a text or messages.

    Of `messages`, every turn of the assistant is trained; with a prompt of messages, those of the completion. `tools`:
    JSON schemas, unless the row has a column of them. `stop`: texts that end a completion without an end token.

    Raises DemonstrationError for a row of another form, and TemplateError if template or tokenizer cannot write it.
    """
    prompt, completion = row.get("prompt"), row.get("completion")
    if row.get("messages"):
        messages = read_messages(row["messages"])
        first = next((place for place, each in enumerate(messages) if each["role"] == "assistant"), len(messages))
    elif not prompt or not completion or not str(completion).strip():
        raise DemonstrationError(f"it has no text in {FORMS}")
    elif not is_conversation(prompt):
        if is_conversation(completion):
            raise DemonstrationError(
                f"its prompt is a text, and its completion is not: {completion!r:.60}; make it one"
            )
        return _encode_text(prompt, completion, turns, stop)
    else:
        said = read_messages(completion) if is_conversation(completion) else [_assistant(completion)]
        messages, first = [*read_messages(prompt), *said], len(prompt)
    return _encode_messages(messages, first, turns, _own_tools(row.get("tools")) or tools)


def _encode_text(prompt: str, completion: str, turns: TurnFormat, stop: Sequence[str]) -> Demonstration:
    found = Demonstration(turns.tokenizer(prompt)["input_ids"])
    end = turns.tokenizer.eos_token or next(iter(turns.ends), "")
    if not end:
        raise DemonstrationError("the model has no token that ends a text: set eos_token in its tokenizer_config.json")
    end = "" if completion.endswith((*stop, *turns.ends)) else end
    ids = turns.tokenizer(completion + end, add_special_tokens=False)["input_ids"]
    found.add(turns.continued(found.prompt_ids, prompt, completion + end, ids), trained=True)
    return found


def _encode_messages(
    messages: Sequence[Message], first: int, turns: TurnFormat, tools: Sequence[Mapping[str, Any]]
) -> Demonstration:
    """Encode as a conversation is held: each turn behind what was said before, and never rendered again. `first`: index
    of the first message that is trained."""
    if first == 0:
        raise DemonstrationError("it begins with the assistant: there is nothing that the policy would be asked")
    for place, message in enumerate(messages):
        if message["role"] not in ROLES:
            raise DemonstrationError(f"message {place} has the role {message['role']!r}: name it {', '.join(ROLES)}")
        if message["role"] == "user" and not message["content"].strip():
            raise DemonstrationError(f"message {place}, the user's, says nothing: leave the row out")
    try:
        found = Demonstration(turns.prompt(messages[:first], tools))
        lost = turns.left_out(messages[:first], tools)
    except Exception as error:  # a template is a program and may raise anything
        raise TemplateError(f"the chat template refuses it: {error}") from error
    if lost is not None:
        said = messages[lost]
        raise TemplateError(
            f"the chat template leaves out message {lost}, the {said['role']}'s: {said['content']!r:.40}; put it into "
            "a message that it writes"
        )
    place = first
    while answers := [*takewhile(lambda message: message["role"] == "assistant", messages[place:])]:
        if len(answers) > 1:
            raise DemonstrationError(f"messages {place} and {place + 1} are both the assistant's: join them")
        if not any(str(answers[0].get(name) or "").strip() for name in ("content", "tool_calls", *REASONING)):
            raise DemonstrationError(f"message {place}, the assistant's, says nothing: leave the row out")
        signs = [str(answers[0].get(name, 1)).strip().lower() for name in ("weight", "train")]  # OpenAI's, axolotl's
        if any(sign in ("0", "0.0", "false") for sign in signs):
            raise DemonstrationError(
                f"message {place}, the assistant's, is marked as not trained, and every turn of `messages` and of "
                "`completion` is: put it into `prompt`, and what follows into `completion`"
            )
        try:
            own = turns.turn(messages[: place + 1], tools, found.prompt_ids + found.completion_ids)
        except TemplateError:
            raise
        except Exception as error:
            raise TemplateError(f"the chat template refuses it: {error}") from error
        found.add(own, trained=True)
        others = [*takewhile(lambda message: message["role"] != "assistant", messages[place + 1 :])]
        place += 1 + len(others)
        if place < len(messages):  # what nothing follows teaches nothing
            found.add(turns.answer(others), trained=False)
    if not found.completion_ids:
        raise DemonstrationError("it has no turn of the assistant")
    return found


def read_messages(given: Any) -> list[Message]:
    """The messages without gaps, contents as text, a call's arguments as an object. Raises DemonstrationError for those
    without role, and for contents that are no text."""
    if not isinstance(given, Sequence) or not all(isinstance(each, Mapping) and each.get("role") for each in given):
        raise DemonstrationError("its messages are not objects with `role` and `content`")
    return [_message(each) for each in without_gaps(given)]


def _message(message: Message) -> Message:
    message, calls = {**message, "content": _text(message.get("content"))}, message.get("tool_calls") or []
    if not calls:
        return {name: value for name, value in message.items() if name != "tool_calls"}
    read = []
    for call in calls if isinstance(calls, list) else [calls]:
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not function.get("name"):
            raise DemonstrationError(f"the call {call!r:.60} has no function with a `name`")
        function = {**function}
        if isinstance(function.get("arguments"), str):
            try:
                function["arguments"] = json.loads(function["arguments"] or "{}")
            except ValueError:
                raise DemonstrationError(f"the arguments {function['arguments']!r} of a call are no JSON") from None
        read.append({"type": "function", **call, "function": function} if "function" in call else function)
    return {**message, "tool_calls": read}


def _text(content: Any) -> str:
    """A message's content, which may be a list of parts of text."""
    parts = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
    found = [part.get("text") for part in parts if isinstance(part, Mapping) and part.get("type") == "text"]
    texts = [text for text in found if isinstance(text, str)]
    if len(texts) < len(parts):
        raise DemonstrationError(f"the content {content!r:.60} of a message is no text, nor a list of parts of text")
    return "".join(texts)


def _assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _own_tools(given: Any) -> list[Mapping[str, Any]]:
    """JSON schemas of a row's column `tools`, which may be written as JSON."""
    try:
        found = (json.loads(given) if isinstance(given, str) else given) or []
    except ValueError:
        found = None
    if not isinstance(found, list) or not all(isinstance(each, Mapping) for each in found):
        raise DemonstrationError(f"its `tools` are no list of JSON schemas: {given!r:.60}")
    return [*without_gaps(found)]
