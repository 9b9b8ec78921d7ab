"""Tool calls in a turn's text, in the forms that chat templates write."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
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


@dataclass(frozen=True)
class Form:
    """A way to write calls: a sign of one, and functions that read a turn's calls, and its text without them."""

    sign: str  # in what a template writes for a call
    calls: Callable[[str, Tools], list[ToolCall]]
    text: Callable[[str], str]


def form_of(written: str) -> str | None:
    """The name of the form in which a template wrote a call; None if it is in none of them."""
    return next((name for name, form in FORMS.items() if form.sign in written), None)


def read_calls(form: str, text: str, tools: Tools) -> list[ToolCall]:
    """The calls in a turn's text, whatever the text. `tools`: needed by forms that do not tell the number 5 from the
    text "5"."""
    return [_checked(call) for call in FORMS[form].calls(text, tools)]


def _checked(call: ToolCall) -> ToolCall:
    """Return the call, or its problem if it cannot be recorded and sent to the tool's process."""
    if not (call.name or call.problem):
        return ToolCall("", problem="the call has no name")
    if _is_deep(call.arguments, DEEPEST):
        return ToolCall("", problem=f"the arguments nest deeper than {DEEPEST} levels")
    try:
        json.dumps([call.name, call.arguments], ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return ToolCall("", problem="the call holds half of a character (a lone surrogate such as \\ud800)")
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


def _tagged(read: Callable[[str, Tools], ToolCall]) -> Callable[[str, Tools], list[ToolCall]]:
    """Make a reader of any number of <tool_call>…</tool_call>, each of which `read` reads."""

    def calls(text: str, tools: Tools) -> list[ToolCall]:
        found = []
        for part in text.split("<tool_call>")[1:]:
            body, closed, _ = part.partition("</tool_call>")
            found.append(read(body, tools) if closed else ToolCall("", problem="the call has no </tool_call>"))
        return found

    return calls


def _hermes(body: str, tools: Tools) -> ToolCall:
    """{"name": …, "arguments": {…}}"""
    return _from_json(body, "arguments")


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


def _llama(text: str, tools: Tools) -> list[ToolCall]:
    """The whole turn is {"name": …, "parameters": {…}}."""
    body = text.strip().removeprefix("<|python_tag|>").strip()
    return [_from_json(body, "parameters")] if body.startswith("{") and '"name"' in body else []


def _mistral(text: str, tools: Tools) -> list[ToolCall]:
    """[TOOL_CALLS][{"name": …, "arguments": {…}}, …], or [TOOL_CALLS]name[ARGS]{…} once for each call."""
    _, sign, rest = text.partition("[TOOL_CALLS]")
    if not sign:
        return []
    if "[ARGS]" in rest:
        parts = [part.partition("[ARGS]") for part in rest.split("[TOOL_CALLS]")]
        return [_with_arguments(re.sub(r"\[CALL_ID\].*", "", name).strip(), body) for name, _, body in parts]
    try:
        calls = _loads(rest)
    except ValueError as error:
        return [ToolCall("", problem=f"the calls are not valid JSON: {error}")]
    return [_from_object(call, "arguments") for call in (calls if isinstance(calls, list) else [calls])]


def _text_before(sign: str) -> Callable[[str], str]:
    return lambda text: text.partition(sign)[0].strip()


PYTHON = {"True": True, "False": False, "None": None}  # how some templates write values other than text
FORMS = {
    "hermes": Form("<tool_call>\n{", _tagged(_hermes), _text_before("<tool_call>")),
    "xml": Form("<function=", _tagged(_xml), _text_before("<tool_call>")),
    "glm": Form("<arg_key>", _tagged(_glm), _text_before("<tool_call>")),
    "mistral": Form("[TOOL_CALLS]", _mistral, _text_before("[TOOL_CALLS]")),
    "llama": Form('"parameters":', _llama, lambda text: ""),
}
