"""Groups of evaluated prompts that belong together: the column `evaluation.group_column`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import polars as pl

from tasks.data.column_fixes import missing_column
from tasks.data.contract import Part, is_there
from tasks.data.path_or_hub import data_set
from tasks.data.repeats import keys_of
from tasks.data.rows import Rows


def group_problems(column: str, parts: Mapping[str, Part], kept: Mapping[str, Rows], whole: bool) -> Iterator[str]:
    """Yield what keeps the evaluated prompts from being grouped: a part without the column, rows without a value, equal
    prompts in different groups. `kept`: the rows of each part that are used; `whole`: see `keys_of`."""
    for name, rows in kept.items():
        if data_set(name) == "train":
            continue
        if column not in rows.columns:
            own, reading = parts[name], ", which evaluation.group_column names"
            yield f"{name} {missing_column(column, reading, rows.empty, own.columns, {}, own.section)}"
            continue
        frames = [(first, frame, is_there(frame, column)) for first, frame in rows.numbered()]
        empty = [first + int(place) for first, _, there in frames for place in (~there).arg_true()]
        if empty:
            yield (
                f"{name}: {len(empty):,} of {rows.height:,} prompts have no value in the column {column!r}, which "
                f"evaluation.group_column names; the first is row {empty[0]} of those kept. Give each prompt a group, "
                "if need be one of its own"
            )
            continue
        keys = pl.concat(
            keys_of(frame, first, whole).select("prompt", "overlap", group=_groups(frame, column))
            for first, frame, _ in frames
        )
        torn = keys.group_by("overlap", maintain_order=True).agg(pl.col("prompt").first(), pl.col("group").n_unique())
        if (torn := torn.filter(pl.col("group") > 1)).height:
            yield (
                f"{name}: {torn.height:,} prompts are in several groups by the column {column!r}, such as "
                f"{torn['prompt'][0]!r}; give equal prompts the same group"
            )


def count_groups(column: str, parts: Mapping[str, Rows]) -> dict[str, int]:
    """Number of groups of each part that is evaluated, and of the whole of each evaluated data set."""
    found: dict[str, set[str]] = {}
    for name, rows in parts.items():
        if data_set(name) != "train":
            own = {group for frame in rows.slices() for group in _groups(frame, column)}
            found[name] = own
            found[data_set(name)] = found.get(data_set(name), set()) | own
    return {name: len(groups) for name, groups in found.items()}


def _groups(frame: pl.DataFrame, column: str) -> pl.Series:
    """Value of each row as text, as an evaluation compares it."""
    return pl.Series("group", [str(value) for value in frame[column].to_list()], dtype=pl.String)
