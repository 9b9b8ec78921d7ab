"""Rewards for completions that are to be data: JSON after a schema."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_core.rewards.basics import Rewards, text_of

FENCED = re.compile(r"^[ \t]*```[ \t]*\w*[ \t]*\n(.*?)^[ \t]*```[ \t]*$", re.DOTALL | re.MULTILINE)


def json_schema(completions: Sequence[Any], schema: Sequence[str | None] | Mapping[str, Any]) -> list[float | None]:
    """1 when the completion is JSON that is valid by the JSON Schema, `format` included, else 0; None without a schema.

    The JSON is the whole completion, or the content of its only fenced block. `schema` is a column with each row's
    schema as JSON text, or one schema for all as a table or JSON text in `args`. Names given twice, NaN and infinities
    are no JSON (RFC 8259); a schema's references to other documents are not fetched. ValueError for a schema that is
    none.
    """
    one = isinstance(schema, (str, Mapping))
    validators = {text: _validator(text) for text in ({_as_text(schema)} if one else {*schema} - {None})}
    return [
        None if given is None else _is_valid(text_of(completion), validators[given])
        for completion, given in zip(completions, [_as_text(schema)] * len(completions) if one else schema, strict=True)
    ]


def _as_text(schema: Any) -> str:
    return schema if isinstance(schema, str) else json.dumps(schema)


def _validator(schema: str) -> Any:
    from jsonschema import FormatChecker, SchemaError
    from jsonschema.validators import Draft202012Validator, validator_for
    from referencing import Registry

    try:
        parsed = json.loads(schema)
        if not isinstance(parsed, (dict, bool)):
            raise ValueError("it is neither an object nor true or false")
        kind = validator_for(parsed, default=Draft202012Validator)
        kind.check_schema(parsed)
        if '"$id"' not in schema:  # references are relative to it
            _follow_references(parsed, kind.META_SCHEMA["$schema"])
    except (ValueError, SchemaError) as error:
        (message, *_) = str(error).splitlines()
        raise ValueError(f"no JSON Schema: {schema[:200]!r}: {message}") from error
    # An own registry: the default one would fetch what a reference names.
    return kind(parsed, registry=Registry(), format_checker=FormatChecker())


def _follow_references(schema: Any, dialect: str) -> None:
    """ValueError where a reference within the schema leads nowhere: else only a completion that meets it would tell."""
    from referencing import Registry
    from referencing.exceptions import Unresolvable
    from referencing.jsonschema import specification_with

    resolver = Registry().with_resource("", specification_with(dialect).create_resource(schema)).resolver()
    inside = [schema]
    while inside:
        part = inside.pop()
        inside += part.values() if isinstance(part, dict) else part if isinstance(part, list) else []
        if isinstance(part, dict) and isinstance(reference := part.get("$ref"), str):
            try:
                resolver.lookup(reference)
            except Unresolvable:
                raise ValueError(f"its reference {reference!r} leads nowhere") from None


def _is_valid(text: str, validator: Any) -> float:
    blocks = FENCED.findall(text)
    if len(blocks) > 1:
        return 0.0
    try:
        document = json.loads(
            blocks[0] if blocks else text,
            object_pairs_hook=_different_names,
            parse_float=_finite,
            parse_constant=_finite,
        )
        return float(validator.is_valid(document))
    # RecursionError: a thousand opening brackets; ArithmeticError: 400 digits, of which a multiple is asked
    except (ValueError, ArithmeticError, RecursionError):
        return 0.0


def _different_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name is given twice")
    return found


def _finite(number: str) -> float:
    if not math.isfinite(value := float(number)):
        raise ValueError(f"{number} is no JSON")
    return value


REWARDS: Rewards = {"json_schema": (json_schema, (0.0, 1.0))}
