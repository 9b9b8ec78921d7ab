"""Makes the columns that a run needs from those that a data set has: `[data.columns]` and `data.system_prompt`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import polars as pl
import pyarrow as pa

from grpo_core.config.columns import columns_read, is_function, is_template, template_parts
from grpo_core.config.inputs import PromptSource
from grpo_core.data import own_code
from tasks.data.images.columns import NAMES, has_parts, with_marks
from tasks.data.rows import MixedKindsError, Rows, kept_on_disk

SLICE = 10_000  # rows converted to Python objects at a time
SEPARATOR = "\n"  # between the texts of a list, in a template


class ColumnError(ValueError):
    """Raised if a column cannot be made; the message names the column and the row."""


def with_columns(rows: Rows, config: PromptSource, section: str = "data") -> Rows:
    """Add the columns that the configuration makes; all others stay. A column is left out if the data set lacks a part
    of it. `section`: section of this configuration. Raises ColumnError if a column cannot be made, and ConfigError if a
    function is missing."""
    made = {
        column: how
        for column, how in config.columns.items()
        if all(taken(part, rows.schema) is not None for part in columns_read(how))
    }
    left_out = [column for column in config.columns if column not in made]
    other = [
        name for name in NAMES if {*NAMES} & made.keys() and name not in made
    ]  # images are in the one that is made

    def make(frame: pl.DataFrame, first: int = 0) -> pl.DataFrame:
        columns = {column: _made(frame, f"{section}.columns.{column}", how, first) for column, how in made.items()}
        return frame.drop(left_out, strict=False).with_columns(**columns).drop(other, strict=False)

    if any(map(is_function, made.values())):  # their types follow from all rows
        try:
            rows = kept_on_disk(make(frame, first) for first, frame in rows.numbered())
        except MixedKindsError as error:
            raise ColumnError(f"{section}.columns: a function returns values of several kinds: {error}") from error
    elif config.columns:
        rows = rows.map(make)
    if has_parts(rows.schema):
        rows = rows.map(with_marks)
    if config.system_prompt is not None and "prompt" in rows.columns:
        prompt = _after_system_prompt(rows.schema["prompt"], config.system_prompt)
        rows = rows.map(lambda frame: frame.with_columns(prompt=prompt))
    return rows


def taken(column: str, schema: Mapping[str, pl.DataType]) -> pl.Expr | None:
    """A column of the data set, or a field of a column of objects by its path, as in `reward_model.ground_truth`; None
    if there is none."""
    if column in schema:
        return pl.col(column)
    name, *fields = column.split(".")
    found, kind = pl.col(name), schema.get(name)
    for each in fields:
        kinds = {field.name: field.dtype for field in kind.fields} if isinstance(kind, pl.Struct) else {}
        found, kind = found.struct.field(each), kinds.get(each)
    return None if kind is None else found


def _made(frame: pl.DataFrame, key: str, how: str, first: int) -> Any:
    if is_function(how):
        return _called(frame, key, how, first)
    if not is_template(how):
        return taken(how, frame.schema)
    parts = []
    for text, part in template_parts(how):
        parts += [pl.lit(text)] if text else []
        parts += [_as_text(part, frame, f"{key} = {how!r}")] if part else []
    return pl.concat_str(parts)  # null where a part is null


def _as_text(column: str, frame: pl.DataFrame, what: str) -> pl.Expr:
    """Text of a column's values; whole numbers as such (see `grpo_core.rewards.builtin.record.written`)."""
    found: Any = taken(column, frame.schema)
    kind = frame.clear().select(found.alias(column)).schema[column]
    if kind == pl.List(pl.String):
        return found.list.join(SEPARATOR)
    if kind.is_nested() or kind in (pl.Object, pl.Duration):
        raise ColumnError(
            f"{what}: the column {column!r} holds {kind}; a template takes text, numbers and lists of text: write a "
            "function, module:function"
        )
    if kind == pl.Binary:  # what is no UTF-8 becomes U+FFFD, which the rule `encoding` finds
        return found.map_elements(lambda value: value.decode(errors="replace"), return_dtype=pl.String)
    text = found.cast(pl.String)
    return text.str.strip_suffix(".0") if kind.is_float() else text


def _called(frame: pl.DataFrame, key: str, name: str, first: int) -> pl.Series:
    """Call a function for each row and return its values. `first`: number of the first row."""
    function, parts = own_code.find(key, name), []
    for start in range(0, frame.height, SLICE):
        values = []
        for row, given in enumerate(frame.slice(start, SLICE).iter_rows(named=True), first + start):
            try:
                values.append(function(given))
            except (Exception, SystemExit) as error:  # a user's code may do anything
                raise ColumnError(f"{key} = {name!r} fails at row {row}: {type(error).__name__}: {error}") from error
        try:
            parts.append(pa.table({key: pa.array(values)}))  # polars would drop fields that only later rows have
        except (pa.ArrowException, OverflowError) as error:
            rows = f"rows {first + start} to {first + start + len(values) - 1}"
            raise ColumnError(
                f"{key} = {name!r} returns a value that no column can hold, in {rows}: {error}"
            ) from error
    if not parts:
        return pl.Series(dtype=pl.String)
    try:
        return pl.DataFrame(pl.from_arrow(pa.concat_tables(parts, promote_options="permissive"))).to_series()
    except pa.ArrowException as error:
        raise ColumnError(f"{key} = {name!r} returns values of several kinds: {error}") from error


def _after_system_prompt(kind: pl.DataType, text: str) -> pl.Expr:
    """Put this system message before each prompt that has none. Prompts of no known kind stay as they are."""
    prompt = pl.col("prompt")
    if kind == pl.String:
        system = [_message("system", pl.lit(text))] if text else []
        messages = pl.concat_list([*system, _message("user", prompt)])
        return pl.when(prompt.is_not_null()).then(messages)
    fields = kind.inner.fields if isinstance(kind, pl.List) and isinstance(kind.inner, pl.Struct) else []
    if not text or not {"role", "content"} <= {field.name for field in fields}:
        return prompt
    system_message = pl.lit(pl.Series([[{"role": "system", "content": text}]], dtype=kind))
    first = prompt.list.first().struct.field("role")
    return pl.when(first != "system").then(pl.concat_list(system_message, prompt)).otherwise(prompt)


def _message(role: str, content: pl.Expr) -> pl.Expr:
    return pl.struct(role=pl.lit(role), content=content)
