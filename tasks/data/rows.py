"""Rows that may be more than memory holds: they are read slice by slice, and no more than a slice is in memory."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

SLICE_ROWS = 100_000  # of a slice at most
SLICE_BYTES = 2**26  # of a slice, as nearly as its file tells
AT_ONCE = 2**28  # bytes in memory of a data set that is written as one table
GROUP = 1024  # rows of a group of a larger one


class MixedKindsError(ValueError):
    """A column with values of several kinds."""


@dataclass(frozen=True)
class Rows:
    """Rows in the same slices each time that they are read. `empty`: their columns, without rows; `read`: the slices,
    with these columns."""

    empty: pl.DataFrame
    height: int
    read: Callable[[], Iterator[pl.DataFrame]]

    @property
    def columns(self) -> list[str]:
        return self.empty.columns

    @property
    def schema(self) -> pl.Schema:
        return self.empty.schema

    def slices(self) -> Iterator[pl.DataFrame]:
        """At least one slice, which may be empty."""
        frames = self.read()
        yield next(frames, self.empty)
        yield from frames

    def numbered(self) -> Iterator[tuple[int, pl.DataFrame]]:
        """Each slice, after the number of its first row."""
        first = 0
        for frame in self.slices():
            yield first, frame
            first += frame.height

    def map(self, change: Callable[[pl.DataFrame], pl.DataFrame]) -> Rows:
        """These rows with other columns."""
        return Rows(change(self.empty), self.height, lambda: map(change, self.slices()))

    def where(self, keep: pl.Series) -> Rows:
        """The rows that are to be kept, of which `keep` says which."""
        return Rows(
            self.empty,
            int(keep.sum()),
            lambda: (frame.filter(keep.slice(first, frame.height)) for first, frame in self.numbered()),
        )

    def gather(self, rows: pl.Series | list[int]) -> pl.DataFrame:
        """The rows of these numbers, in the order of the data."""
        wanted = pl.repeat(False, self.height, eager=True).scatter(rows, True)
        return pl.concat([self.empty, *self.where(wanted).slices()])


def of_frame(frame: pl.DataFrame) -> Rows:
    return Rows(frame.clear(), frame.height, lambda: frame.iter_slices(SLICE_ROWS))


def slice_rows(height: int, size: int) -> int:
    """Rows of a slice, of a file with `height` rows and `size` bytes."""
    return max(1, min(SLICE_ROWS, SLICE_BYTES * height // max(size, 1)))


def kept_on_disk(frames: Iterator[pl.DataFrame]) -> Rows:
    """The rows of one or more frames, each column of a type that holds the values of all frames. A single frame stays
    in memory; several are in temporary files, for as long as these rows are in use. Raises MixedKindsError."""
    first = next(frames)
    second = next(frames, None)
    if second is None:
        return of_frame(first)
    folder = tempfile.TemporaryDirectory(prefix="grpo-data-")
    empty, height, files = first.clear(), 0, []
    for number, frame in enumerate(itertools.chain([first, second], frames)):
        files.append(Path(folder.name, f"{number}.arrow"))
        frame.write_ipc(files[-1], compression="lz4")
        empty, height = with_common_types(empty, frame.clear()), height + frame.height

    def read(folder: Any = folder) -> Iterator[pl.DataFrame]:  # it holds the folder
        for file in files:
            for frame in pl.read_ipc(file).iter_slices(SLICE_ROWS):
                yield as_columns(frame, empty)

    return Rows(empty, height, read)


def with_common_types(one: pl.DataFrame, other: pl.DataFrame) -> pl.DataFrame:
    """The columns of both, each of the type that holds the values of both. Raises MixedKindsError."""
    for column, kind in other.schema.items():
        if not alike(kind, found := one.schema.get(column, kind)):
            raise MixedKindsError(f"column {column!r} is {found} in some rows and {kind} in others")
    return pl.concat([one, other], how="diagonal_relaxed")


def as_columns(frame: pl.DataFrame, empty: pl.DataFrame) -> pl.DataFrame:
    """The rows with the columns of `empty`, whose types hold their values; null in columns that they do not have."""
    if frame.schema == empty.schema:
        return frame
    return pl.concat([empty, frame], how="diagonal_relaxed") if frame.width else empty.clear(frame.height)


def alike(one: Any, other: Any) -> bool:
    """Whether a type holds the values of both of these types as they are."""
    if pl.Null in (one, other) or (one.is_numeric() and other.is_numeric()):
        return True
    if isinstance(one, pl.List) and isinstance(other, pl.List):
        return alike(one.inner, other.inner)
    if isinstance(one, pl.Struct) and isinstance(other, pl.Struct):
        kinds = {field.name: field.dtype for field in one.fields}
        return all(alike(kinds[field.name], field.dtype) for field in other.fields if field.name in kinds)
    return one == other


def write_rows(rows: Rows, path: Path) -> None:
    """Write the rows as Parquet: a few as one table; many in groups of GROUP rows, of which a training reads those that
    it needs."""
    frames, first, size = rows.slices(), [], 0
    for frame in frames:
        first.append(frame)
        size += frame.estimated_size()
        if size > AT_ONCE:
            break
    if size <= AT_ONCE:
        pl.concat(first, rechunk=True).write_parquet(path)
        return
    import pyarrow.parquet as pq

    columns = rows.empty.to_arrow(compat_level=pl.CompatLevel.oldest()).schema
    with pq.ParquetWriter(path, columns, compression="zstd") as writer:
        for frame in itertools.chain(first, frames):
            writer.write_table(frame.to_arrow(compat_level=pl.CompatLevel.oldest()), row_group_size=GROUP)
