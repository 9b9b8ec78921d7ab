"""Turns of a conversation as token ids.

A conversation is one growing list of ids, and is never rendered again: what the policy sampled stays as it was sampled,
and each of its turns is followed by what the chat template writes between that turn and the next. This text is found by
rendering a short stand-in conversation in which the policy's turn is a mark.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_core.environments.calls import FORMS, ToolCall, Tools, form_of, read_calls
from grpo_core.errors import GrpoError

Message = Mapping[str, Any]
FIRST: Message = {"role": "user", "content": "x"}
MARK = "pageturn"  # of letters only: templates may trim, quote or check what stands for a name


class TemplateError(GrpoError):
    """A chat template that cannot write an environment's answers."""


@dataclass(frozen=True)
class TurnFormat:
    """The way in which a model's chat template writes turns. `ends`: texts of the tokens at which the engine ends one;
    `options`: variables of the template, such as enable_thinking."""

    tokenizer: Any
    ends: tuple[str, ...]
    options: Mapping[str, Any]

    def prompt(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids up to the policy's first turn. `tools`: JSON schemas."""
        text = self._render(messages, tools=list(tools) or None, add_generation_prompt=True)
        return self._encode(text)

    def answer(self, messages: Sequence[Message]) -> list[int]:
        """Token ids between the end token of the policy's turn and its next turn: messages of tools or of the user.
        Raises TemplateError if the template cannot write them."""
        contents = [str(message["content"]) for message in messages]
        mark = next(mark for mark in _marks() if not any(mark in content for content in contents))
        after = self._after(mark, messages)
        if not any(token in content for token in self.tokenizer.all_special_tokens for content in contents):
            return self._encode(after)
        # A special token that an answer spells out must not become one: the answer could end its own turn.
        ids: list[int] = []
        for content in filter(None, contents):
            written = _written(content, after)
            before, _, after = after.partition(written)
            ids += self._encode(before)
            ids += self.tokenizer(written, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        return ids + self._encode(after)

    def read(self, ids: Sequence[int], tools: Tools) -> tuple[str, list[ToolCall]]:
        """The text of the policy's turn without its tool calls, and these. `tools`: JSON schemas by name."""
        form = form_of(self._call_as_written())
        if form is not None:
            written = self.tokenizer.decode(ids, skip_special_tokens=False)
            for end in self.ends:
                written = written.removesuffix(end)
            if calls := read_calls(form, written, tools):
                return FORMS[form].text(written), calls
        return self.tokenizer.decode(ids, skip_special_tokens=True), []

    def write(self, calls: Sequence[ToolCall]) -> str:
        """A turn of the policy that makes these calls, as the template writes it, without its end token. Raises
        TemplateError if the template cannot write them."""
        written = [{"id": f"call{place:05d}", **call.message} for place, call in enumerate(calls)]
        try:
            text = self._render([FIRST, {"role": "assistant", "content": "", "tool_calls": written}])
            said = self._render([FIRST, {"role": "assistant", "content": MARK}])
        except Exception as error:  # a template may raise anything, for instance for several calls in a turn
            raise TemplateError(
                f"the chat template of {self.tokenizer.name_or_path!r} cannot write the turn: {error}"
            ) from error
        before = said.rpartition(MARK)[0]
        same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(before, text, strict=False))
        turn = text[len([*same]) :]
        return turn[: min((turn.find(end) for end in self.ends if end in turn), default=len(turn))]

    def problem(self, with_tools: bool) -> str:
        """Reason why conversations of several turns cannot be held with this template; "" if they can."""
        role = "tool" if with_tools else "user"
        if with_tools and form_of(self._call_as_written()) is None:
            return (
                f"the chat template of {self.tokenizer.name_or_path!r} writes tool calls in no known form "
                f"({', '.join(FORMS)}); take a model that was trained to call tools"
            )
        try:
            self.answer([{"role": role, "name": "tool", "content": "answer"}])
        except TemplateError as error:
            return str(error)
        return ""

    def note(self, role: str) -> str:
        """Note on what a template does to earlier turns and training does not; "" if it leaves them as they are."""
        thought = {"role": "assistant", "content": f"<think>\n{MARK}\n</think>\n\nx"}
        try:
            text = self._render([FIRST, thought, {"role": role, "name": "tool", "content": "y"}])
        except Exception:
            return ""
        if MARK in text:
            return ""
        return (
            "the chat template leaves the thoughts of earlier turns out (<think>…</think>). In training they stay in "
            "the conversation as they were sampled; elsewhere the policy may be asked without them"
        )

    def _after(self, mark: str, messages: Sequence[Message]) -> str:
        """Text that the template writes after the end token of the turn that the mark stands for."""
        problem = "it leaves out what the assistant has said"
        for turn, answers in _stand_ins(mark, messages):
            try:
                text = self._render([FIRST, turn, *answers], add_generation_prompt=True)
            except Exception as error:  # a template may raise anything for roles that it does not know
                problem = str(error)
                continue
            _, found, rest = text.rpartition(mark)
            if not found or not all(_written(str(message["content"]), rest) in rest for message in messages):
                problem = f"it leaves out what the {messages[0]['role']} says"
                continue
            if places := [(rest.find(end), end) for end in self.ends if end in rest]:
                place, end = min(places)
                return rest[place + len(end) :]
            problem = (
                f"it ends turns by {rest[:20]!r}, and the model stops at {', '.join(map(repr, self.ends))}: set "
                "eos_token_id in the model's generation_config.json to the token that ends a turn"
            )
        raise TemplateError(
            f"the chat template of {self.tokenizer.name_or_path!r} cannot continue after a message of role "
            f"{messages[0]['role']!r}: {problem}"
        )

    def _call_as_written(self) -> str:
        """Text that the template writes for a tool call; "" if it writes none."""
        call = {"id": "a1b2c3d4e", "type": "function", "function": {"name": MARK, "arguments": {"key": "value"}}}
        try:
            text = self._render([FIRST, {"role": "assistant", "content": "", "tool_calls": [call]}])
        except Exception:
            return ""
        return text if MARK in text else ""

    def _render(self, messages: Sequence[Message], **options: Any) -> str:
        return self.tokenizer.apply_chat_template(list(messages), tokenize=False, **self.options, **options)

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]


def _written(content: str, text: str) -> str:
    """The content as a template has written it into the text: some trim it, some quote it as JSON."""
    quoted = json.dumps(content, ensure_ascii=False)[1:-1]
    return next((form for form in (content, content.strip(), quoted) if form in text), content)


def _marks() -> Iterator[str]:
    return (MARK * count for count in itertools.count(1))


def _stand_ins(mark: str, messages: Sequence[Message]) -> Iterator[tuple[Message, Sequence[Message]]]:
    """Turns of the assistant that end with the mark, and the messages as answers to them. Some templates take a tool's
    answer only after its call."""
    yield {"role": "assistant", "content": mark}, [*messages]
    if messages[0]["role"] == "tool":
        names = [f"call{number:05d}" for number in range(len(messages))]  # Mistral's have nine characters
        calls = [{"id": name, "type": "function", "function": {"name": mark, "arguments": {}}} for name in names]
        answers = [{**message, "tool_call_id": name} for message, name in zip(messages, names, strict=True)]
        yield {"role": "assistant", "content": "", "tool_calls": calls}, answers
