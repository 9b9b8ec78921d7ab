"""Finds prompts that come twice, or that are both trained on and evaluated on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import polars as pl

from tasks.data.lengths import tool_calls
from tasks.data.rows import Rows
from tasks.data.sources import is_unstorable

INVISIBLE = r"[\x{200B}-\x{200D}\x{2060}\x{FEFF}]"
# `other`: the part of the data with the same prompt.
FINDING = dict.fromkeys(["dataset", "row", "column", "check", "value", "other"], pl.String) | {"row": pl.UInt32}
NONE = pl.DataFrame(schema=FINDING)
SHOWN = 80  # characters of a value in a finding


def is_conversation(frame: pl.DataFrame, column: str = "prompt") -> bool:
    """True if the prompts are lists of messages."""
    kind = frame.schema[column]
    if not (isinstance(kind, pl.List) and isinstance(kind.inner, pl.Struct)):
        return False
    fields = {field.name: field.dtype for field in kind.inner.fields}
    return fields.get("role") == pl.String and fields.get("content") == pl.String


def prompt_text(frame: pl.DataFrame, whole: bool = False) -> pl.Series:
    """Write each prompt as one text, the messages of a conversation with their roles, so that equal texts are equal
    prompts. `whole`: include the row's other columns, as JSON."""
    text = pl.col("prompt")
    if is_conversation(frame):
        message, calls = pl.element().struct, tool_calls(frame.schema["prompt"])
        parts = (message.field("role"), message.field("content"), calls)
        text = text.list.eval(pl.concat_str(*parts, separator=" ␟ ", ignore_nulls=True)).list.join(" ␞ ")
    others = [name for name, kind in sorted(frame.schema.items()) if name != "prompt" and not is_unstorable(kind)]
    if whole and others:
        text = pl.concat_str(text, pl.struct(others).struct.json_encode(), separator=" ␟ ")
    return frame.select(text).to_series()


def key_of(value: pl.Expr) -> pl.Expr:
    """Hash of a value in 128 bits: among ten million different values, two agree with a probability of 1e-25."""
    high, low = (value.hash(seed).cast(pl.Int128) for seed in (1, 2))
    return high * pl.lit(2**64, pl.Int128) + low


def keys_of(frame: pl.DataFrame, first: int, whole: bool) -> pl.DataFrame:
    """Columns by which the prompts that are not null are compared: row (from `first` on), text as shown in findings,
    and keys for `overlap` and `near_overlap`."""
    text = pl.col("text")
    # Collapses white space; not touching the many single spaces is four times as fast.
    near = text.str.to_lowercase().str.replace_all(INVISIBLE, "").str.replace_all(r"\s{2,}|[^\S ]", " ")
    return (
        prompt_text(frame, whole)
        .to_frame("text")
        .select(
            prompt=shown(text),
            overlap=pl.when(text.is_not_null()).then(key_of(text)),
            near_overlap=pl.when(text.is_not_null()).then(key_of(near.str.strip_chars())),
        )
        .with_row_index("row", first)
    )


def duplicates(parts: Mapping[str, Rows], keys: Mapping[str, pl.DataFrame], whole: bool) -> Iterator[pl.DataFrame]:
    """Yield, for each part of a data set, the rows whose prompt is that of an earlier row of the data set. `keys`: row
    and key (`overlap`) of the rows that stay, by part."""
    kind = pl.Enum([*parts])
    rows = pl.concat(keys[name].select("row", "overlap", other=pl.lit(name, kind)) for name in parts)
    is_first = rows["overlap"].is_first_distinct()
    again = rows.filter(~is_first).rename({"other": "dataset"})
    first = rows.filter(is_first).rename({"row": "first"})
    found = again.join(first, on="overlap", maintain_order="left")
    for name, part in parts.items():
        own = found.filter(pl.col("dataset") == name)
        wanted = pl.repeat(False, part.height, eager=True).scatter(own["row"], True)
        texts = [
            prompt_text(frame, whole).to_frame("text").select(shown(pl.col("text")))
            for frame in part.where(wanted).slices()
        ]
        place = pl.format("{} ({} row {})", "text", "other", "first")
        yield own.with_columns(pl.concat(texts).to_series()).select(
            pl.col("dataset").cast(pl.String),
            "row",
            column=pl.lit("prompt"),
            check=pl.lit("duplicate_prompt"),
            value=pl.when(pl.col("other") == name).then("text").otherwise(place),
            other=pl.col("other").cast(pl.String),
        )


def firsts(keys: Mapping[str, pl.DataFrame]) -> dict[str, pl.DataFrame]:
    """Each key of these parts once, with the part and row that has it first; for `overlap` and for `near_overlap`."""
    return {
        kind: pl.concat([_firsts(name, own, kind) for name, own in keys.items()]).unique(kind, keep="first")
        for kind in ("overlap", "near_overlap")
    }


def _firsts(name: str, keys: pl.DataFrame, kind: str) -> pl.DataFrame:
    own = keys.select(kind, "row").unique(kind, keep="first")
    return own.select(kind, other=pl.lit(name), where=pl.format("{} row {}", pl.lit(name), pl.col("row")))


def among(name: str, keys: pl.DataFrame, others: Mapping[str, pl.DataFrame]) -> dict[str, pl.DataFrame]:
    """Rows of a part whose keys are among those of others, as FINDING; for `overlap` and for `near_overlap`."""
    return {
        kind: keys.join(known, on=kind, maintain_order="left").select(
            dataset=pl.lit(name),
            row="row",
            column=pl.lit("prompt"),
            check=pl.lit(kind),
            value=pl.format("{} ({})", "prompt", "where"),
            other="other",
        )
        for kind, known in others.items()
    }


def shown(text: pl.Expr) -> pl.Expr:
    """A value as shown in findings, cut after SHOWN characters."""
    return pl.when(text.str.len_chars() > SHOWN).then(text.str.head(SHOWN - 1) + "…").otherwise(text)
