"""Suggests what to set in `[data.columns]` if a data set's columns are not those that a run needs."""

from __future__ import annotations

import difflib
import json
import re
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl

from grpo_core.config.columns import columns_read
from grpo_core.data import chat_exports
from tasks.data.columns import taken
from tasks.data.repeats import is_conversation

# Names in published data sets for the columns that a run needs, the usual name first.
USUAL = {
    "prompt": ("question", "problem", "instruction", "messages", "query", "input", "text", "task"),
    "answer": ("solution", "final_answer", "ground_truth", "target", "expected", "label", "gold", "output", "response"),
    "reference": ("summary", "completion", "highlights", "target", "response", "output"),
    "tests": ("test_list", "test", "test_cases", "unit_tests", "assertions"),
}

# Words in the names of columns that say what a completion should be, and so are no prompt.
ANSWERING = re.compile(
    r"(?i)(?<![a-z])(answers?|solutions?|targets?|labels?|expected|gold(en)?|truths?|outputs?|responses?|completions?|"
    r"references?|results?)(?![a-z])"
)


def missing_column(
    column: str,
    reading: str,
    frame: pl.DataFrame,
    columns: Mapping[str, str],
    read: Mapping[str, Mapping[str, Any]],
    section: str = "data",
    own: Sequence[str] = (),
) -> str:
    """Part of a sentence: the column is missing (`reading`: its reader), and this key in `section` would make it.
    `own`: columns of the data set itself, if they are not those of `frame`, whose first row is looked at."""
    kinds = read.get(column, {}).values()
    others: dict[str, Any] = {it: kind for it, kind in frame.schema.items() if it not in read and it != "prompt"}
    if column == "prompt":
        able = [name for name, kind in others.items() if kind == pl.String or is_conversation(frame, name)]
        able = [name for name in able if not ANSWERING.search(name)]
    else:
        others |= {
            f"{name}.{field.name}": field.dtype
            for name, kind in others.items()
            for field in (kind.fields if isinstance(kind, pl.Struct) else ())
        }
        able = [name for name, found in others.items() if all(accepts(kind, found) for kind in kinds)]
    read_now = columns_read(columns.get(column, column))
    wanted = [part for part in read_now if taken(part, frame.schema) is None] or [column]
    likely = _likely(column, wanted[0], able)
    if column not in columns and likely not in {*USUAL.get(column, ())} - {*chat_exports.COLUMNS}:
        likely = _of_chat_export(column, frame) or likely
    key = f"{section}.columns.{column}"
    hint = (
        f"leave {key} out, or set it to what the column should be made from"
        if column in own
        else f"set {key} = {json.dumps(likely, ensure_ascii=False)}"
        if likely
        else f"set {key} to what it should be made from"
    )
    if column == "completion":
        hint += "; a reward gets what the model writes as 'completions'"
    made = f" (for {key} = {columns[column]!r})" if column in columns else ""
    return f"has no column {wanted[0]!r}{made}{reading}; its columns are {', '.join(own or frame.columns)}: {hint}"


def wrong_type(column: str, kind: Any, frame: pl.DataFrame, columns: Mapping[str, str], section: str = "data") -> str:
    """End of a sentence: the key that would write the column as text; "" if text is not needed."""
    found = frame.schema[column]
    able = not (found.is_nested() or found in (pl.Object, pl.Duration)) or found == pl.List(pl.String)
    if column in columns or not able or found == pl.Null or not accepts(kind, pl.String()):
        return ""
    template = json.dumps(f"{{{column}}}", ensure_ascii=False)
    return f": {section}.columns.{column} = {template} writes it as text"


def _likely(column: str, wanted: str, able: list[str]) -> str | None:
    """Column that is most likely meant: one of a similar name, of a usual name, the only one of a fitting type, or the
    first that could be the prompt."""
    like = difflib.get_close_matches(wanted, able, n=1)
    known = USUAL.get(column, ())
    usual = [name for name in known if name in able]
    usual += [name for each in (*known, column) for name in able if name.endswith(f".{each}")]
    only = able if column == "prompt" or len(able) == 1 else []
    return next(iter([*like, *usual, *only]), None)


def _of_chat_export(column: str, frame: pl.DataFrame) -> str | None:
    """The function that makes this column of conversations which end with the answer; None if the first row has no such
    conversation."""
    makes = {"prompt": chat_exports.asked, "answer": chat_exports.answered, "reference": chat_exports.answered}.get(
        column
    )
    if makes is None or frame.is_empty() or chat_exports.asked(frame.row(0, named=True)) is None:
        return None
    return f"{makes.__module__}:{makes.__name__}"


def accepts(kind: Any, found: pl.DataType) -> bool:
    """True if a parameter annotated with `kind` takes values of this Arrow type."""
    if found == pl.Null:
        return False
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return any(accepts(option, found) for option in typing.get_args(kind) if option is not type(None))
    known = {
        str: found == pl.String,
        bool: found == pl.Boolean,
        int: found.is_integer(),
        float: found.is_numeric(),
        list: isinstance(found, (pl.List, pl.Array)),
        dict: isinstance(found, pl.Struct),
    }
    return known.get(typing.get_origin(kind) or kind, True)
