"""The reward for JSON by a schema: values, and schemas that are faulty."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from grpo_core.rewards.builtin.structured import json_schema

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "born": {"type": "string", "format": "date"},
        "score": {"type": "number"},
    },
    "required": ["name"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    "completion",
    [
        '{"name": "Ada"}',
        ' {"name": "Ada", "born": "1815-12-10", "score": 1.5e2}\n',
        '```json\n{"name": "Ada"}\n```',
        'Here it is:\n\n```\n{"name":\n "```Ada"}\n```\nAs you asked.',
    ],
)
def test_json_schema_takes_bare_and_fenced_json(completion: str) -> None:
    assert json_schema([completion], SCHEMA) == [1]
    assert json_schema([completion], [json.dumps(SCHEMA)]) == [1]


@pytest.mark.parametrize(
    "completion",
    [
        "",
        "null",
        "{}",
        '{"name": 1}',
        '{"name": "Ada", "more": 1}',
        '{"name": "Ada", "born": "yesterday"}',
        "{'name': 'Ada'}",
        '{"name": "Ada",}',
        '{"name": "Ada"} {"name": "Ada"}',
        'The JSON: {"name": "Ada"}',
        '{"name": 1, "name": "Ada"}',  # which of the two a reader takes is its own affair
        '{"name": "Ada", "score": NaN}',
        '{"name": "Ada", "score": Infinity}',
        '{"name": "Ada", "score": 1e400}',
        '```json\n{"name": 1}\n```\n```json\n{"name": "Ada"}\n```',
        '```json\n{"name": "Ada"}',
        "[" * 100_000,
        '{"name": "Ada", "score": ' + "9" * 5000 + "}",
    ],
)
def test_json_schema_takes_nothing_else(completion: str) -> None:
    assert json_schema([completion], SCHEMA) == [0]


def test_each_row_may_have_its_own_schema_or_none() -> None:
    assert json_schema(["1", "1", "1"], ['{"type": "integer"}', '{"type": "string"}', None]) == [1, 0, None]


@pytest.mark.parametrize("schema", [{"multipleOf": 0.01}, {"format": "regex"}])
@pytest.mark.parametrize("completion", ["9" * 400, '"a{99999999999}"'])
def test_json_schema_survives_values_that_its_library_does_not(completion: str, schema: dict[str, Any]) -> None:
    assert json_schema([completion], {"type": "null", **schema}) == [0]
    assert json_schema([completion], schema) in ([0], [1])


@pytest.mark.parametrize(
    "schema",
    [
        "{",
        '{"type": "text"}',
        "3",
        '{"$ref": "https://a.example/b"}',
        '{"$ref": "http://[a"}',
        '{"title": "a", "properties": {"a": {"$ref": "#/title"}}}',
        '{"$schema": "http://json-schema.org/draft-04/schema#", "properties": {"a": {"$ref": 5}}}',
        '{"kept": {"type": "text"}, "properties": {"a": {"$ref": "#/kept"}}}',
        '{"not":' * 3000 + "{}" + "}" * 3000,
    ],
)
def test_a_schema_that_is_none_is_named(schema: str) -> None:
    with pytest.raises(ValueError, match="no JSON Schema: "):
        json_schema(["1"], [schema])


TARGET = {"$anchor": "here", "$dynamicAnchor": "moving", "type": "integer"}

INSIDE: dict[str, Any] = {
    "properties": lambda part: ({"properties": {"a": part}}, '{"a": 1}'),
    "items": lambda part: ({"items": part}, "[1]"),
    "a condition": lambda part: ({"if": {"const": 1}, "then": part}, "1"),
    "a definition": lambda part: ({"$ref": "#/$defs/other", "$defs": {"other": part}}, "1"),
    "an unknown keyword": lambda part: ({"$ref": "#/kept/here", "kept": {"here": part}}, "1"),
}

REFERENCES = [
    ("$ref", "#/$defs/target", "#/$defs/gone"),
    ("$ref", "#here", "#gone"),
    ("$dynamicRef", "#moving", "#gone"),
    ("$dynamicRef", "#/$defs/target", "#/$defs/gone"),
    ("$ref", "inner", "gone"),
    ("$ref", "inner#/$defs/deep", "inner#/$defs/gone"),
]


@pytest.mark.slow
@pytest.mark.parametrize("base", [None, "https://a.example/schema"])
@pytest.mark.parametrize("inside", INSIDE)
@pytest.mark.parametrize(("keyword", "sound", "dangling"), REFERENCES)
def test_a_reference_that_leads_nowhere_is_found_before_a_completion_meets_it(
    base: str | None, inside: str, keyword: str, sound: str, dangling: str
) -> None:
    def schema(reference: str) -> tuple[dict[str, Any], str]:
        outer, completion = INSIDE[inside]({keyword: reference})
        inner = {"$id": "inner", "type": "integer", "$defs": {"deep": {"type": "integer"}}}
        definitions = outer.pop("$defs", {}) | {"target": TARGET, "inner": inner}
        return {**({"$id": base} if base else {}), **outer, "$defs": definitions}, completion

    found, completion = schema(sound)
    assert json_schema([completion, completion.replace("1", '"x"')], found) == [1, 1 if inside == "a condition" else 0]
    found, _ = schema(dangling)
    with pytest.raises(ValueError, match=re.escape(f"its reference {dangling!r} leads nowhere")):
        json_schema(["a completion that is no JSON"], found)


def test_a_fault_of_a_schema_that_only_a_completion_meets_ends_no_training() -> None:
    """Draft 4 does not say that names of patternProperties are regular expressions."""
    schema = {"$schema": "http://json-schema.org/draft-04/schema#", "patternProperties": {"(": {}}}
    assert json_schema(['{"a": 1}', "1"], schema) == [0, 1]
