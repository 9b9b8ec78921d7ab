"""Prompts that come twice, or are both trained on and evaluated on."""

from __future__ import annotations

from collections.abc import Mapping

import polars as pl

from tasks.data.lengths import tool_calls
from tasks.data.places import data_set
from tasks.data.sources import is_unstorable

INVISIBLE = r"[\x{200B}-\x{200D}\x{2060}\x{FEFF}]"
FINDING = {"dataset": pl.String, "row": pl.UInt32, "column": pl.String, "check": pl.String, "value": pl.String}
NONE = pl.DataFrame(schema=FINDING)
SLICE = 100_000  # rows whose texts are in memory at once to be compared
SHOWN = 80  # characters of a value in a finding


def is_conversation(frame: pl.DataFrame, column: str = "prompt") -> bool:
    """Whether the prompts are lists of messages."""
    kind = frame.schema[column]
    if not (isinstance(kind, pl.List) and isinstance(kind.inner, pl.Struct)):
        return False
    fields = {field.name: field.dtype for field in kind.inner.fields}
    return fields.get("role") == pl.String and fields.get("content") == pl.String


def prompt_text(frame: pl.DataFrame, whole: bool = False) -> pl.Series:
    """Each prompt as one text, the messages of a conversation with their roles: equal texts are equal prompts. `whole`:
    with the row's other columns, as JSON."""
    text = pl.col("prompt")
    if is_conversation(frame):
        message, calls = pl.element().struct, tool_calls(frame.schema["prompt"])
        parts = (message.field("role"), message.field("content"), calls)
        text = text.list.eval(pl.concat_str(*parts, separator=" ␟ ", ignore_nulls=True)).list.join(" ␞ ")
    others = [name for name, kind in sorted(frame.schema.items()) if name != "prompt" and not is_unstorable(kind)]
    if whole and others:
        text = pl.concat_str(text, pl.struct(others).struct.json_encode(), separator=" ␟ ")
    return frame.select(text).to_series()


def duplicates(name: str, frame: pl.DataFrame, staying: pl.Series, whole: bool) -> pl.DataFrame:
    """Rows whose prompt is the same as that of an earlier row, among the rows that stay."""
    text = prompt_text(frame, whole).filter(staying)
    again = text.to_frame("text").with_columns(row=staying.arg_true()).filter(~text.is_first_distinct())
    return again.select(
        dataset=pl.lit(name),
        row=pl.col("row").cast(pl.UInt32),
        column=pl.lit("prompt"),
        check=pl.lit("duplicate_prompt"),
        value=shown(pl.col("text")),
    )


def overlap(frames: Mapping[str, pl.DataFrame], staying: Mapping[str, pl.Series], whole: bool) -> pl.DataFrame:
    """Prompts that are both trained on and evaluated on: the same text, or the same except for case and white space.

    Overlaps with eval are reported as rows of train, those with another set as rows of that set, so that a further set
    does not change what is trained on.
    """
    texts = {n: _texts(frame, 0, whole).filter(staying[n]) for n, frame in frames.items() if data_set(n) != "train"}
    held_out = {name: texts.pop(name) for name in [*texts] if data_set(name) == "eval"}
    known = {
        kind: pl.concat([_firsts(name, own, kind) for name, own in held_out.items()]).unique(kind, keep="first")
        for kind in ("overlap", "near_overlap")
    }
    found: dict[str, list[pl.DataFrame]] = {kind: [] for kind in known}
    for name, frame in frames.items():
        for start in range(0, frame.height if data_set(name) == "train" else 0, SLICE):
            part = _texts(frame.slice(start, SLICE), start, whole).filter(staying[name].slice(start, SLICE))
            for kind, firsts in known.items():
                found[kind].append(_among(name, part, firsts, kind))
                found[kind] += [_among(n, own, _firsts(name, part, kind), kind) for n, own in texts.items()]
    # Text that is the same exactly is also the same without regard to case and white space.
    both = pl.concat([*found["overlap"], *found["near_overlap"]])
    return both.unique(["dataset", "row"], keep="first", maintain_order=True)


def _firsts(name: str, texts: pl.DataFrame, kind: str) -> pl.DataFrame:
    """Each text of a data set once, with the row that has it first."""
    return texts.unique(kind, keep="first").select(kind, where=pl.format("{} row {}", pl.lit(name), pl.col("row")))


def _among(name: str, texts: pl.DataFrame, others: pl.DataFrame, kind: str) -> pl.DataFrame:
    """The rows of data set `name` whose texts are among `others`, as FINDING."""
    return texts.join(others, on=kind).select(
        dataset=pl.lit(name),
        row="row",
        column=pl.lit("prompt"),
        check=pl.lit(kind),
        value=pl.format("{} ({})", shown(pl.col("prompt")), pl.col("where")),
    )


def _texts(frame: pl.DataFrame, first_row: int, whole: bool) -> pl.DataFrame:
    """Each prompt that is there: row, prompt, and what is compared for `overlap` and for `near_overlap`."""
    text = prompt_text(frame, whole)
    # White space is collapsed; leaving the many single spaces alone is four times as fast.
    near = text.str.to_lowercase().str.replace_all(INVISIBLE, "").str.replace_all(r"\s{2,}|[^\S ]", " ")
    near = near.str.strip_chars()
    return pl.DataFrame({"prompt": text, "overlap": text, "near_overlap": near}).with_row_index("row", first_row)


def shown(text: pl.Expr) -> pl.Expr:
    """A value as a finding has it, at most SHOWN characters of it."""
    return pl.when(text.str.len_chars() > SHOWN).then(text.str.head(SHOWN - 1) + "…").otherwise(text)
