"""Turns of a conversation as token ids.

A conversation is one growing list of ids, and is never rendered again: what the policy sampled stays as it was sampled,
and each of its turns is followed by what the chat template writes between that turn and the next. This text is found by
rendering a short stand-in conversation in which the policy's turn is a mark.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from grpo_core.data.chat import MARK, as_written, first_unwritten, marks
from grpo_core.environments.calls import FORMS, THOUGHTS, ToolCall, Tools, open_thought, read_turn
from grpo_core.errors import GrpoError

Message = Mapping[str, Any]
FIRST: Message = {"role": "user", "content": "x"}
REASONING = ("reasoning_content", "reasoning", "thinking")  # keys of a thought, as data sets and templates have them
SIGNS = "(" + "|".join(map(re.escape, [*THOUGHTS, *THOUGHTS.values()])) + ")"
NUMBER = {"type": "integer", "description": "A number."}
ADD = {  # a tool: templates write calls only if there are tools, or a model has another template for tools
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": NUMBER, "b": NUMBER}, "required": ["a", "b"]},
    },
}
CALL = ToolCall("add", {"a": 1, "b": -2})


class TemplateError(GrpoError):
    """A chat template that cannot write an environment's answers."""


@dataclass(frozen=True)
class TurnFormat:
    """The way in which a model's chat template writes turns. `ends`: texts of the tokens at which the engine ends one;
    `options`: variables of the template, such as enable_thinking."""

    tokenizer: Any
    ends: tuple[str, ...]
    options: Mapping[str, Any]

    def prompt(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], added: str | None = None
    ) -> list[int]:
        """Token ids up to the policy's first turn. `tools`: JSON schemas; `added`: text behind the last message, in
        which special tokens are plain text, as in an answer."""
        *before, last = messages

        def render(contents: Sequence[str]) -> str:
            end = {**last, "content": last["content"] + contents[0]} if added else last
            return self._render([*before, end], tools=list(tools) or None, add_generation_prompt=True)

        return self._encode_rendered(render, [added or ""])

    def answer(self, messages: Sequence[Message]) -> list[int]:
        """Token ids between the end token of the policy's turn and its next turn: messages of tools or of the user.
        Raises TemplateError if the template cannot write them."""

        def render(contents: Sequence[str]) -> str:
            return self._after([{**each, "content": it} for each, it in zip(messages, contents, strict=True)])

        return self._encode_rendered(render, [str(message["content"]) for message in messages])

    def turn(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], before: Sequence[int]) -> list[int]:
        """Token ids of the last message, a turn of the policy, as the template writes it behind the others: up to its
        end token, which is included. `before`: ids of the others. Raises TemplateError if the template leaves out a
        part of the turn, or writes it in another way than the policy could, or the tokenizer does."""
        *others, last = messages
        options = {"tools": list(tools) or None}
        asked = self._render(others, add_generation_prompt=True, **options)

        def write(turn: Message) -> str:
            text = self._render([*others, turn], **options)
            written = text.removeprefix(asked)
            if written == text:
                raise TemplateError(
                    f"the chat template asks for the policy's turn by {asked[-40:]!r}, and writes the turn behind "
                    f"another text: {text[-120:]!r}; the policy could not say it so. If the model thinks first, a "
                    "variable of the template in data.chat_template_kwargs may tell it not to"
                )
            return written

        whole, (marked, said) = write(last), _marked(last)
        shown = write(marked)
        lost = [key for key, own in said.items() if any(mark not in shown for mark in own)]
        thoughts = [last[key] for key in REASONING if key in said and key not in lost]  # some data have one twice
        if key := next((key for key in lost if key not in REASONING or last[key] not in thoughts), ""):
            calls = [call.get("function", call)["name"] for call in last[key]] if key == "tool_calls" else []
            raise TemplateError(
                f"the chat template of {self.tokenizer.name_or_path!r} leaves out what the assistant says in `{key}`, "
                f"{', '.join(calls) or last[key]!r:.40}: {_remedy(key, last, write)}"
            )
        # Behind a text, the first end is the turn's own. Behind calls, which may spell out others, it is the last.
        spoken = [last["content"]] if last.get("content") else []
        texts = said.get("content", []) if "tool_calls" not in said else []
        behind = shown.rpartition(texts[-1])[2] if texts else None

        def render(contents: Sequence[str]) -> str:
            written = whole if contents == spoken else write({**last, "content": contents[0]})
            own = len(written) - len(behind) if behind is not None and written.endswith(behind) else None
            find = written.rfind if own is None else lambda end: written.find(end, own)
            places = [place + len(end) for end in self.ends if (place := find(end)) >= 0]
            if not places:
                raise TemplateError(
                    f"the chat template ends the policy's turn by {written[-20:]!r}, and the model stops at "
                    f"{', '.join(map(repr, self.ends))}: set eos_token_id in the model's generation_config.json to the "
                    "token that ends a turn"
                )
            return written[: max(places) if own is None else min(places)]

        found = self.continued(before, asked, render(spoken), self._encode_rendered(render, spoken))
        ends = {self.tokenizer.convert_tokens_to_ids(end): end for end in self.ends}
        if early := next((ends[token] for token in found[:-1] if token in ends), None):
            raise TemplateError(
                f"the assistant's turn has {early!r} in its middle, at which the model stops: leave the row out, or "
                "take the token out of eos_token_id in the model's generation_config.json"
            )
        return found

    def left_out(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> int | None:
        """Index of the first of these messages, before the policy's turn, that others say and the template does not
        write."""
        return first_unwritten(
            messages, lambda it: self._render(it, tools=list(tools) or None, add_generation_prompt=True)
        )

    def continued(self, before: Sequence[int], asked: str, text: str, ids: list[int]) -> list[int]:
        """`ids`, or other token ids of the text behind `asked`, that are read as this text behind the ids `before`.
        Raises TemplateError if there are none: some tokenizers join what is on both sides."""
        own = self._encode(asked)
        for found in (ids, self._encode(asked + text)[len(own) :]):
            if self._decode([*before, *found]) == self._decode(before) + text:
                return found
        raise TemplateError(
            f"the tokenizer has no tokens of {text[:40]!r} that stand alone behind {asked[-20:]!r}: begin it with a "
            "space, or end what stands before with another character"
        )

    def _decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def read(self, ids: Sequence[int], tools: Tools) -> tuple[str, list[ToolCall]]:
        """The text of the policy's turn without its tool calls, and these. `tools`: JSON schemas by name."""
        text, calls = self._read(self.form, ids, tools) if self.form else ("", [])
        return (text, calls) if calls else (self.tokenizer.decode(ids, skip_special_tokens=True), [])

    def write(self, calls: Sequence[ToolCall]) -> str:
        """A turn of the policy that makes these calls, as the template writes it, without its end token. Raises
        TemplateError if the template cannot write them."""
        written = [{"id": f"call{place:05d}", **call.message} for place, call in enumerate(calls)]
        try:
            text = self._render([FIRST, {"role": "assistant", "content": "", "tool_calls": written}], tools=[ADD])
            said = self._render([FIRST, {"role": "assistant", "content": MARK}], tools=[ADD])
        except Exception as error:  # a template may raise anything, for instance for several calls in a turn
            raise TemplateError(
                f"the chat template of {self.tokenizer.name_or_path!r} cannot write the turn: {error}"
            ) from error
        before = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(said.rpartition(MARK)[0], text, strict=False))
        common = "".join(character for character, _ in before)
        turn = text[len(re.sub(r"[<\[][^<>\[\]]*$", "", common)) :]  # begins with no part of a tag
        turn = turn[: min((turn.find(end) for end in self.ends if end in turn), default=len(turn))]
        closing = THOUGHTS.get(self._thought, "")
        return turn if closing in turn else f"{closing}\n\n{turn.lstrip()}"

    @cached_property
    def form(self) -> str | None:
        """Name of the form in which the template writes calls; None if it writes none that is read as it was meant."""
        try:
            ids = self._encode(self.write([CALL]))
        except TemplateError:
            return None
        return next((form for form in FORMS if self._read(form, ids, {"add": ADD})[1] == [CALL]), None)

    def problem(self) -> str:
        """Reason why conversations with tools cannot be held with this template; "" if they can."""
        try:
            written = self.write([CALL])
            if self.form:
                self.answer([{"role": "tool", "name": CALL.name, "content": "answer"}])
                return ""
        except TemplateError as error:
            return str(error)
        found = f"the call add(a=1, b=-2) as {written!r}, and only calls in other forms are read ({', '.join(FORMS)})"
        return (
            f"the chat template of {self.tokenizer.name_or_path!r} writes {found if 'add' in written else 'no calls'}; "
            "take a model of a family that docs/how-to/environments.md lists"
        )

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

    def _read(self, form: str, ids: Sequence[int], tools: Tools) -> tuple[str, list[ToolCall]]:
        written = self.tokenizer.decode(ids, skip_special_tokens=False)
        for end in self.ends:
            written = written.removesuffix(end)
        return read_turn(form, written, tools, self._thought)

    @cached_property
    def _thought(self) -> str:
        """What the template has opened, before each turn of the policy, as its thought; "" if it opens none."""
        text = self._render([{"role": "user", "content": MARK}], tools=[ADD], add_generation_prompt=True)
        return open_thought(text.rpartition(MARK)[2])

    def _after(self, messages: Sequence[Message]) -> str:
        """Text that the template writes before the policy's next turn, after the end token of the one before."""
        problem = "it leaves out what the assistant has said"
        tools = [ADD] if messages[0]["role"] == "tool" else None
        mark = next(marks([str(message["content"]) for message in messages]))
        for turn, answers in _stand_ins(mark, messages):
            try:
                text = self._render([FIRST, turn, *answers], tools=tools, add_generation_prompt=True)
            except Exception as error:  # a template may raise anything for roles that it does not know
                problem = str(error)
                continue
            _, found, rest = text.rpartition(mark)
            if not found or any(as_written(str(message["content"]), rest) is None for message in messages):
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

    def _render(self, messages: Sequence[Message], **options: Any) -> str:
        return self.tokenizer.apply_chat_template(list(messages), tokenize=False, **self.options, **options)

    def _encode(self, text: str, **options: Any) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False, **options)["input_ids"]

    def _encode_rendered(self, render: Callable[[Sequence[str]], str], contents: Sequence[str]) -> list[int]:
        """Token ids of what the template writes for the contents. A special token that a content spells out does not
        become one: it could end its own turn. `render`: gives the text for any contents."""
        spelled = [place for place, content in enumerate(contents) if any(it in content for it in self._special_tokens)]
        if not spelled:
            return self._encode(render(contents))
        stand_ins = dict(zip(spelled, marks(contents), strict=False))
        marked = [stand_ins.get(place, content) for place, content in enumerate(contents)]
        text, ids, end = render(marked), list[int](), 0
        for place, mark in stand_ins.items():
            before, _, after = text.partition(mark)
            whole = render([*marked[:place], contents[place], *marked[place + 1 :]])
            written = whole[len(before) : len(whole) - len(after)]  # some templates trim it, some quote it as JSON
            ids += self._encode(before[end:]) + self._encode(written, split_special_tokens=True)
            end = len(before) + len(mark)
        return ids + self._encode(text[end:])

    @cached_property
    def _special_tokens(self) -> set[str]:
        """Texts of all special tokens, also of those without a role, as most of Llama 3's are."""
        added = self.tokenizer.added_tokens_decoder.values()
        return {*self.tokenizer.all_special_tokens, *(token.content for token in added if token.special)}


def _marked(turn: Message) -> tuple[Message, dict[str, list[str]]]:
    """The turn of the assistant with marks in the place of what it says (texts between the signs of thoughts, which
    templates write in ways of their own, and names of functions), and these marks by the turn's keys."""
    new, found = marks([str(turn)]), dict[str, list[str]]()
    marked: dict[str, Any] = {**turn}
    for key in ("content", *REASONING):
        if isinstance(turn.get(key), str):  # else it is a setting
            parts = re.split(SIGNS, turn[key])
            for place, part in enumerate(parts):
                if place % 2 == 0 and part.strip():
                    found.setdefault(key, []).append(next(new))
                    parts[place] = part[: -len(part.lstrip())] + found[key][-1] + part[len(part.rstrip()) :]
            marked[key] = "".join(parts)
    if calls := turn.get("tool_calls"):
        found["tool_calls"] = [next(new) for _ in calls]
        marked["tool_calls"] = [
            {**call, "function": {**call["function"], "name": mark}} if "function" in call else {**call, "name": mark}
            for call, mark in zip(calls, found["tool_calls"], strict=True)
        ]
    return marked, found


def _remedy(key: str, turn: Message, write: Callable[[Message], str]) -> str:
    """What to do if the template leaves out what a turn says by this key."""
    model = "take a model whose template writes it"
    if key == "tool_calls":
        return model
    if key == "content":
        return f"leave the text or the calls out, or {model}" if turn.get("tool_calls") else f"reword it, or {model}"
    for other in REASONING:
        with suppress(Exception):  # a template is a program and may raise anything
            if MARK in write({name: value for name, value in turn.items() if name != key} | {other: MARK}):
                return f"name it `{other}`"
    return f"write it into `content`, as the model writes thoughts, or {model}"


def _stand_ins(mark: str, messages: Sequence[Message]) -> Iterator[tuple[Message, Sequence[Message]]]:
    """Turns of the assistant that end with the mark, and the messages as answers to them. Some templates take a tool's
    answer only after its call."""
    yield {"role": "assistant", "content": mark}, [*messages]
    if messages[0]["role"] == "tool":
        names = [f"call{number:05d}" for number in range(len(messages))]  # Mistral's have nine characters
        calls = [{"id": name, "type": "function", "function": {"name": mark, "arguments": {}}} for name in names]
        answers = [{**message, "tool_call_id": name} for message, name in zip(messages, names, strict=True)]
        yield {"role": "assistant", "content": "", "tool_calls": calls}, answers
