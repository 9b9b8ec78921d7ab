"""Tool calls in a turn's text, in the forms that chat templates write."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

ERROR = "Error: "  # begins the answer to a call that failed
DEEPEST = 64  # levels of lists and objects
Tools = Mapping[str, Mapping[str, Any]]  # JSON schema of each tool, by its name


@dataclass(frozen=True)
class ToolCall:
    """A call as the policy wrote it; `problem`: why it cannot be made, "" if it can."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    problem: str = ""

    @property
    def message(self) -> dict[str, Any]:
        """The call as it stands in a message of the assistant."""
        return {"type": "function", "function": {"name": self.name, "arguments": self.arguments}}


Part = tuple[str, ToolCall | None]  # a piece of a turn's text, and the call that it is, if it is one


@dataclass(frozen=True)
class Form:
    """A way to write calls: the sign that begins one, and a function that divides a turn's text into its parts."""

    sign: str
    parts: Callable[[str, Tools], Iterable[Part]]


def read_turn(form: str, text: str, tools: Tools, thought: str = "") -> tuple[str, list[ToolCall]]:
    """The text of a turn without the calls that can be read, and all its calls, whatever the text.

    What stands in a thought is no call. `tools`: needed by forms that do not tell the number 5 from the text "5";
    `thought`: see `open_thought`, of what stands before the turn.
    """
    begin = _end_of_thoughts(text, FORMS[form].sign, thought)
    said, calls = [text[:begin]], list[ToolCall]()
    for written, part in FORMS[form].parts(text[begin:], tools):
        call = part and _checked(part)
        if call:
            calls.append(call)
        if not call or call.problem:
            said.append(written)
    return "".join(said).strip(), calls


def open_thought(text: str) -> str:
    """What has opened the thought in which the text ends; "" if it ends in none."""
    return next((it for it, closing in THOUGHTS.items() if text.rfind(it) > text.rfind(closing)), "")


def _end_of_thoughts(text: str, sign: str, thought: str) -> int:
    """Place where the last thought before the first call ends; 0 without one. What opens a thought in a call, as part
    of an argument, opens none."""
    end = 0
    for opening, closing in THOUGHTS.items():
        start = 0 if opening == thought else text.find(opening, end)
        while start >= 0 and sign not in text[end:start]:
            close = text.find(closing, start)
            if close < 0:
                return len(text)
            end = close + len(closing)
            start = text.find(opening, end)
    return end


def _checked(call: ToolCall) -> ToolCall:
    """Return the call, or its problem if it cannot be recorded and sent to the tool's process."""
    if not (call.name or call.problem):
        return ToolCall("", problem="the call has no name")
    if _is_deep(call.arguments, DEEPEST):
        return ToolCall("", problem=f"the arguments nest deeper than {DEEPEST} levels")
    try:
        json.dumps([call.name, call.arguments], ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        return ToolCall("", problem="the call holds half of a character (a lone surrogate such as \\ud800)")
    except ValueError:
        return ToolCall("", problem="the call holds NaN or a number beyond any float, which JSON does not have")
    return call


def _is_deep(value: Any, levels: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels < 0 or any(_is_deep(each, levels - 1) for each in inner)


def _loads(text: str) -> Any:
    """Parse JSON. Raises ValueError if that fails."""
    try:
        return json.loads(text, strict=False)
    except RecursionError:
        raise ValueError("it nests too deep") from None


def _from_json(text: str, arguments_key: str) -> ToolCall:
    """Read `{"name": …, ARGUMENTS_KEY: {…}}` as a call."""
    try:
        call = _loads(text)
    except ValueError as error:
        return ToolCall("", problem=f"the call is not valid JSON: {error}")
    return _from_object(call, arguments_key)


def _from_object(call: Any, arguments_key: str) -> ToolCall:
    name = call.get("name") if isinstance(call, dict) else None
    if not isinstance(name, str):
        return ToolCall("", problem='the call is no object with a "name"')
    return _with_arguments(name, call.get(arguments_key, {}), arguments_key)


def _with_arguments(name: str, arguments: Any, key: str = "arguments") -> ToolCall:
    if isinstance(arguments, str):  # some models write them as text
        try:
            arguments = _loads(arguments)
        except ValueError as error:
            return ToolCall(name, problem=f'"{key}" is not valid JSON: {error}')
    if not isinstance(arguments, dict):
        return ToolCall(name, problem=f'"{key}" is no object')
    return ToolCall(name, arguments)


def _tagged(read: Callable[[str, Tools], ToolCall]) -> Form:
    """The form of any number of <tool_call>…</tool_call>, each of which `read` reads."""

    def parts(text: str, tools: Tools) -> Iterator[Part]:
        before, *rest = text.split("<tool_call>")
        yield before, None
        for part in rest:
            body, closed, after = part.partition("</tool_call>")
            call = read(body, tools) if closed else ToolCall("", problem="the call has no </tool_call>")
            yield f"<tool_call>{body}{closed}", call
            yield after, None

    return Form("<tool_call>", parts)


def _xml(body: str, tools: Tools) -> ToolCall:
    """<function=NAME><parameter=KEY>value</parameter>…</function>"""
    _, opened, rest = body.partition("<function=")
    name, named, rest = rest.partition(">")
    rest, closed, _ = rest.rpartition("</function>")
    if not (opened and named and closed):
        return ToolCall("", problem="the call is no <function=NAME>…</function>")
    arguments = {}
    for part in rest.split("<parameter=")[1:]:
        key, named, value = part.partition(">")
        value, closed, _ = value.rpartition("</parameter>")
        if not (named and closed):
            return ToolCall(name.strip(), problem=f"the parameter {key[:80]!r} has no </parameter>")
        arguments[key.strip()] = value.removeprefix("\n").removesuffix("\n")
    return _typed(name.strip(), arguments, tools)


def _glm(body: str, tools: Tools) -> ToolCall:
    """NAME<arg_key>KEY</arg_key><arg_value>value</arg_value>…"""
    name, *parts = body.split("<arg_key>")
    arguments = {}
    for part in parts:
        key, named, value = part.partition("</arg_key>")
        _, opened, value = value.partition("<arg_value>")
        value, closed, _ = value.rpartition("</arg_value>")
        if not (named and opened and closed):
            return ToolCall(name.strip(), problem=f"the argument {key[:80]!r} has no <arg_value>…</arg_value>")
        arguments[key.strip()] = value
    return _typed(name.strip(), arguments, tools)


def _typed(name: str, arguments: Mapping[str, str], tools: Tools) -> ToolCall:
    """A call whose arguments were written as text: those that are not text by the tool's schema are read as JSON."""
    schema = tools[name]["function"]["parameters"] if name in tools else {}
    kinds = schema.get("properties", {})
    return ToolCall(name, {key: _value(value, kinds.get(key, {})) for key, value in arguments.items()})


def _value(text: str, schema: Mapping[str, Any]) -> Any:
    if schema.get("nullable") and text in ("None", "null"):
        return None
    if "string" in schema.get("type", ()):  # the name of a type, or a list of names
        return text
    if text in PYTHON:
        return PYTHON[text]
    try:
        return _loads(text)
    except ValueError:
        return text


def _llama(text: str, tools: Tools) -> Iterator[Part]:
    """The whole turn is {"name": …, "parameters": {…}}."""
    body = text.strip().removeprefix("<|python_tag|>").strip()
    yield text, _from_json(body, "parameters") if body.startswith("{") and '"name"' in body else None


def _mistral(text: str, tools: Tools) -> Iterator[Part]:
    """[TOOL_CALLS][{"name": …, "arguments": {…}}, …], or [TOOL_CALLS]name[ARGS]{…} once for each call."""
    before, sign, rest = text.partition("[TOOL_CALLS]")
    yield before, None
    if "[ARGS]" in rest:
        for part in rest.split(sign):
            name, _, body = part.partition("[ARGS]")
            yield f"{sign}{part}", _with_arguments(re.sub(r"\[CALL_ID\].*", "", name).strip(), body)
    elif sign:
        try:
            calls = _loads(rest)
        except ValueError as error:
            yield f"{sign}{rest}", ToolCall("", problem=f"the calls are not valid JSON: {error}")
            return
        for number, call in enumerate(calls if isinstance(calls, list) else [calls]):
            yield "" if number else f"{sign}{rest}", _from_object(call, "arguments")


SIGNS = (  # of a call in some family's form, or in a text about one
    "tool_call", "<function", "<invoke", "[TOOL_CALLS]", "<|python_tag|>", "<arg_key>", '"arguments"', '"parameters"'
)  # fmt: skip
PYTHON = {"True": True, "False": False, "None": None}  # how some templates write values other than text
THOUGHTS = {"<think>": "</think>", "[THINK]": "[/THINK]"}
FORMS = {
    "hermes": _tagged(lambda body, _: _from_json(body, "arguments")),
    "xml": _tagged(_xml),
    "glm": _tagged(_glm),
    "mistral": Form("[TOOL_CALLS]", _mistral),
    "llama": Form("{", _llama),
}
