"""Where data sets have their images, made one form: the messages are text with a mark for each image that stands in
them, and the column `images` lists the images' bytes or paths."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import polars as pl

from grpo_core.data.images import MARK

NAMES = ("images", "image")
SOURCE = pl.Struct({"bytes": pl.Binary, "path": pl.String})  # an image as datasets stores it; a path may be a data: URL
NO_IMAGES = pl.lit(pl.Series([[]], dtype=pl.List(SOURCE))).first()
PAYLOADS = ("image", "image_url", "url", "path", "base64")  # keys of a content part


def has_parts(schema: Mapping[str, pl.DataType]) -> bool:
    """True if the prompts are messages of content parts."""
    content = _fields(schema.get("prompt")).get("content")
    return "type" in _fields(content)


def all_in_parts(rows: list[Any]) -> bool:
    """Make the texts of messages content parts, if a message of these rows, read from JSON, has parts. Returns whether
    one has."""
    messages = [
        message
        for row in rows
        if isinstance(row, dict)
        for value in row.values()
        if isinstance(value, list)
        for message in value
        if isinstance(message, dict) and "role" in message
    ]
    found = any(isinstance(message.get("content"), list) for message in messages)
    for message in messages:
        if found and isinstance(text := message.get("content"), str):
            message["content"] = [{"type": "text", "text": text}]
    return found


def _fields(kind: Any) -> dict[str, Any]:
    """Fields of a list's objects; none of any other type."""
    inner = kind.inner if isinstance(kind, pl.List) else None
    return {field.name: field.dtype for field in inner.fields} if isinstance(inner, pl.Struct) else {}


def column_of(schema: Mapping[str, pl.DataType]) -> str | None:
    """The column with the images; None if there is none, or only one of nulls."""
    return next((name for name in NAMES if schema.get(name, pl.Null()) != pl.Null), None)


def sources(schema: Mapping[str, pl.DataType]) -> pl.Expr | None:
    """The images of each row, as a list of SOURCE: from a column of paths, bytes, or datasets' images, or of lists of
    these. None if its type is another."""
    if (name := column_of(schema)) is None:
        return NO_IMAGES
    kind = schema[name]
    if isinstance(kind, pl.List):
        each = _source(pl.element(), kind.inner)
        found = None if each is None else pl.col(name).list.eval(each)
    else:
        one = _source(pl.col(name), kind)
        found = None if one is None else pl.when(pl.col(name).is_not_null()).then(pl.concat_list(one))
    return None if found is None else found.fill_null([]).cast(pl.List(SOURCE))


def _source(value: pl.Expr, kind: Any) -> pl.Expr | None:
    nothing = {"bytes": pl.lit(None, pl.Binary), "path": pl.lit(None, pl.String)}
    if kind in (pl.String, pl.Binary):
        return _struct(nothing | {"path" if kind == pl.String else "bytes": value})
    if not isinstance(kind, pl.Struct):
        return None
    own = {field.name: field.dtype for field in kind.fields}
    if not own or any(kind not in (SOURCE.to_schema().get(name), pl.Null) for name, kind in own.items()):
        return None
    return _struct({name: value.struct.field(name) if name in own else it for name, it in nothing.items()})


def _struct(fields: Mapping[str, pl.Expr]) -> pl.Expr:
    return pl.struct(value.alias(name) for name, value in fields.items())


def with_marks(frame: pl.DataFrame) -> pl.DataFrame:
    """Write messages of content parts as text, with a mark for each image. The images are those in the parts; those
    that a part has no image for are taken from the column, in order."""
    given = sources(frame.schema)
    given = NO_IMAGES if given is None else given  # a column of that name that has none
    texts, images = [], []
    for messages, others in frame.select("prompt", given.alias("others")).iter_rows():
        waiting, found = iter(others), []
        texts.append(messages and [{**it, "content": _text(it["content"], found, waiting)} for it in messages])
        images.append([it for it in [*found, *waiting] if it is not None])
    kind: Any = frame.schema["prompt"]
    fields = {field.name: field.dtype for field in kind.inner.fields} | {"content": pl.String()}
    return frame.drop(NAMES, strict=False).with_columns(
        prompt=pl.Series(texts, dtype=pl.List(pl.Struct(fields))), images=pl.Series(images, dtype=pl.List(SOURCE))
    )


def _text(content: list[dict[str, Any]] | None, found: list[Any], waiting: Iterator[Any]) -> str | None:
    """The text of content parts. Appends its images to `found`. None for parts of another kind, such as a video's."""
    texts = []
    for part in content or []:
        if part["type"] == "text" and part.get("text") is not None:
            texts.append(part["text"])
        elif part["type"] in ("image", "image_url"):
            texts.append(MARK)
            own = next((each for key in PAYLOADS if (each := _payload(key, part.get(key)))), None)
            found.append(own or next(waiting, None))
        else:
            return None
    return None if content is None else "".join(texts)


def _payload(key: str, value: Any) -> dict[str, Any] | None:
    if isinstance(value, dict):
        value = value.get("bytes") or value.get("path") or value.get("url")
    if not value:
        return None
    if isinstance(value, bytes):
        return {"bytes": value, "path": None}
    return {"bytes": None, "path": f"data:;base64,{value}" if key == "base64" else str(value)}


def column_problem(name: str, schema: Mapping[str, pl.DataType]) -> str:
    """The problem, in a sentence, of a part whose images cannot be used; "" if there is none."""
    column = column_of(schema)
    if column and sources(schema) is None:
        return (
            f"{name}, column {column!r}: its type is {schema[column]}; an image is a path, bytes, or datasets' image, "
            "and several are a list of these. Name the column of the images in data.columns, or give this one "
            "another name if it has none"
        )
    if column == NAMES[0] and schema.get(NAMES[1], pl.Null()) != pl.Null:
        return f"{name} has the columns {NAMES[0]!r} and {NAMES[1]!r}: images are in one of them, leave one out"
    if column and schema.get("prompt") == pl.String:
        return (
            f"the prompts of {name} are text, and images stand in messages: "
            'data.system_prompt = "" makes messages of text'
        )
    return ""
