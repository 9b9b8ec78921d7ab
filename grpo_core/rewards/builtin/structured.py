"""Rewards for completions that have to be data: JSON by a schema."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_core.data.chat import text_of
from grpo_core.rewards.builtin.record import BuiltinReward, Rewards

REFERENCES = {"$ref", "$dynamicRef"}
FENCED = re.compile(r"^[ \t]*```[ \t]*\w*[ \t]*\n(.*?)^[ \t]*```[ \t]*$", re.DOTALL | re.MULTILINE)


def json_schema(completions: Sequence[Any], schema: Sequence[str | None] | Mapping[str, Any]) -> list[float | None]:
    """1 if the completion is JSON that is valid by the JSON Schema, `format` included, else 0; None without a schema.

    The JSON is the whole completion, or the content of its only fenced block. `schema` is a column with each row's
    schema as JSON text, or, in `args`, one schema for all as a table or JSON text. Names given twice, NaN and
    infinities are not JSON (RFC 8259); a schema's references to other documents are not fetched. Raises ValueError if a
    schema is not valid.
    """
    one = isinstance(schema, (str, Mapping))
    schemas = {_as_text(schema)} if one else {given for given in schema if given is not None}
    validators = {text: _validator(text) for text in schemas}
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
        _follow_references(parsed, kind)
    except (ValueError, SchemaError, RecursionError) as error:
        message = str(error).partition("\n")[0]
        raise ValueError(f"no JSON Schema: {schema[:200]!r}: {message}") from error
    # The default registry would fetch what a reference names.
    return kind(parsed, registry=Registry(), format_checker=FormatChecker())


def schema_problem(schema: str) -> str:
    """The problem of a schema, given as JSON text; "" if it has none."""
    try:
        _validator(schema)
    except ValueError as error:
        return str(error)
    return ""


def _follow_references(schema: Any, kind: Any) -> None:
    """Raises ValueError if a reference leads to no schema; otherwise only a completion that reaches it would show that.

    Follows the schema, the schemas within it and those that references lead to, each with its own base URI.
    """
    from referencing import Registry
    from referencing.exceptions import Unresolvable
    from referencing.jsonschema import specification_with

    specification = specification_with(kind.META_SCHEMA["$schema"])
    root = specification.create_resource(schema)
    to_do = [(schema, Registry().resolver_with_root(root))]
    seen: set[int] = set()
    while to_do:
        part, resolver = to_do.pop()
        if not isinstance(part, dict) or id(part) in seen:
            continue
        seen.add(id(part))
        for keyword in REFERENCES & part.keys():
            try:
                target = resolver.lookup(part[keyword])
            except (Unresolvable, TypeError, AttributeError, ValueError):  # also if it is not text, or not a URI
                raise ValueError(f"its reference {part[keyword]!r} leads nowhere") from None
            if not isinstance(target.contents, (dict, bool)):
                raise ValueError(f"its reference {part[keyword]!r} leads to no schema")
            kind.check_schema(target.contents)  # it may be in a place where no schema is looked for
            to_do.append((target.contents, target.resolver))
        for inside in specification.create_resource(part).subresources():
            to_do.append((inside.contents, resolver.in_subresource(inside)))


def _is_valid(text: str, validator: Any) -> float:
    from referencing.exceptions import Unresolvable

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
    # RecursionError: a thousand opening brackets; ArithmeticError: 400 digits, of which a multiple is asked;
    # Unresolvable and re.error: faults of a schema that only a completion meets
    except (ValueError, ArithmeticError, RecursionError, Unresolvable, re.error):
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


REWARDS: Rewards = {
    "json_schema": BuiltinReward(
        json_schema,
        (0.0, 1.0),
        looks_at_text_only=True,
        value_problems={"schema": schema_problem},
        extra="rewards",
        modules=("jsonschema", "referencing"),
    )
}
