"""Arrow tables as Polars frames, whatever other programs have put into columns, of which a run may read none."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import polars as pl
import pyarrow as pa

BYTES = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary(), pa.string_view(): pa.binary_view()}
PARTS_OF_AN_HOUR = re.compile(r"[+-]\d\d:?(?!00)\d\d")  # zones such as +05:30, which Polars refuses


def to_frame(table: pa.Table) -> pl.DataFrame:
    """Convert a table, with types that rewards know: encoded text becomes text, an array of fixed length a list, an
    extension what it is stored as, numbers beyond 38 digits their text; instants in a zone such as +05:30 are in UTC.

    Bytes of a text that are no UTF-8 become U+FFFD: where a column is read, the rule `encoding` finds them.
    """
    kinds = [field.with_type(_changed(field.type, _known)) for field in table.schema]
    table = pa.Table.from_arrays(
        [
            column if column.type == field.type else column.cast(field.type)
            for column, field in zip(table.columns, kinds, strict=True)
        ],
        schema=pa.schema(kinds),
    )
    try:
        table.validate(full=True)
    except pa.ArrowInvalid:
        table = pa.table([_decoded(column) for column in table.columns], table.column_names)
    frame = pl.DataFrame(pl.from_arrow(table))
    extensions = [name for name, kind in frame.schema.items() if isinstance(kind, pl.BaseExtension)]
    frame = frame.with_columns(pl.col(extensions).ext.storage())
    encoded = [name for name, kind in frame.schema.items() if isinstance(kind, (pl.Categorical, pl.Enum))]
    arrays = {name: kind for name, kind in frame.schema.items() if isinstance(kind, pl.Array)}
    casts = [pl.col(encoded).cast(pl.String), *(pl.col(n).cast(pl.List(kind.inner)) for n, kind in arrays.items())]
    return frame.with_columns(casts)


def _changed(kind: Any, change: Callable[[Any], Any]) -> Any:
    """The type with `change` applied to what it consists of."""

    def inside(field: Any) -> Any:
        return field.with_type(_changed(field.type, change))

    if pa.types.is_struct(kind):
        return pa.struct([inside(field) for field in kind])
    if pa.types.is_map(kind):
        return pa.map_(inside(kind.key_field), inside(kind.item_field))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(inside(kind.value_field), kind.list_size)
    if pa.types.is_large_list(kind):
        return pa.large_list(inside(kind.value_field))
    return pa.list_(inside(kind.value_field)) if pa.types.is_list(kind) else change(kind)


def _known(kind: Any) -> Any:
    if pa.types.is_timestamp(kind) and PARTS_OF_AN_HOUR.fullmatch(kind.tz or ""):
        return pa.timestamp(kind.unit, "UTC")
    return pa.string() if pa.types.is_decimal256(kind) else kind


def _decoded(column: Any) -> Any:
    """The column with U+FFFD for bytes that are no UTF-8."""
    bare = _changed(column.type, lambda kind: BYTES.get(kind, kind))
    return column if bare == column.type else pa.array(_texts(column.cast(bare).to_pylist()), column.type)


def _texts(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, (list, tuple)):
        return [_texts(part) for part in value]
    return {key: _texts(part) for key, part in value.items()} if isinstance(value, dict) else value
