"""Tool calls in a turn's text, in the forms that chat templates write."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ToolCall:
    """A call as the policy wrote it; `problem`: why it cannot be made, "" if it can."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    problem: str = ""

    @property
    def message(self) -> dict[str, Any]:
        """The call as a message of the assistant has it."""
        return {"type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True)
class Form:
    """A way to write calls: how a turn that has one looks, its calls, and its text without them."""

    sign: str  # in what a template writes for a call
    calls: Callable[[str], list[ToolCall]]
    text: Callable[[str], str]


def form_of(written: str) -> str | None:
    """The name of the form in which a template wrote a call; None if it is in none of them."""
    return next((name for name, form in FORMS.items() if form.sign in written), None)


def _from_json(text: str, arguments_key: str) -> ToolCall:
    """`{"name": …, ARGUMENTS_KEY: {…}}` as a call."""
    try:
        call = json.loads(text, strict=False)
    except ValueError as error:
        return ToolCall("", problem=f"the call is not valid JSON: {error}")
    name = call.get("name") if isinstance(call, dict) else None
    if not isinstance(name, str):
        return ToolCall("", problem='the call is no object with a "name"')
    return _with_arguments(name, call.get(arguments_key, {}), arguments_key)


def _with_arguments(name: str, arguments: Any, key: str = "arguments") -> ToolCall:
    if isinstance(arguments, str):  # some models write them as text
        try:
            arguments = json.loads(arguments, strict=False)
        except ValueError as error:
            return ToolCall(name, problem=f'"{key}" is not valid JSON: {error}')
    if not isinstance(arguments, dict):
        return ToolCall(name, problem=f'"{key}" is no object')
    return ToolCall(name, arguments)


def _hermes(text: str) -> list[ToolCall]:
    """<tool_call>{"name": …, "arguments": {…}}</tool_call>, any number of them."""
    found = []
    for part in text.split("<tool_call>")[1:]:
        body, closed, _ = part.partition("</tool_call>")
        found.append(_from_json(body, "arguments") if closed else ToolCall("", problem="the call has no </tool_call>"))
    return found


def _llama(text: str) -> list[ToolCall]:
    """The whole turn is {"name": …, "parameters": {…}}."""
    body = text.strip().removeprefix("<|python_tag|>").strip()
    return [_from_json(body, "parameters")] if body.startswith("{") and '"name"' in body else []


def _mistral(text: str) -> list[ToolCall]:
    """[TOOL_CALLS][{"name": …, "arguments": {…}}, …], or [TOOL_CALLS]name[ARGS]{…} once for each call."""
    _, sign, rest = text.partition("[TOOL_CALLS]")
    if not sign:
        return []
    if "[ARGS]" in rest:
        parts = [part.partition("[ARGS]") for part in rest.split("[TOOL_CALLS]")]
        return [_with_arguments(re.sub(r"\[CALL_ID\].*", "", name).strip(), body) for name, _, body in parts]
    try:
        calls = json.loads(rest, strict=False)
    except ValueError as error:
        return [ToolCall("", problem=f"the calls are not valid JSON: {error}")]
    return [_from_json(json.dumps(call), "arguments") for call in (calls if isinstance(calls, list) else [calls])]


FORMS = {
    "hermes": Form("<tool_call>\n{", _hermes, lambda text: text.partition("<tool_call>")[0].strip()),
    "mistral": Form("[TOOL_CALLS]", _mistral, lambda text: text.partition("[TOOL_CALLS]")[0].strip()),
    "llama": Form('"parameters":', _llama, lambda text: ""),
}
