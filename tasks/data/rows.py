"""Rows that may exceed memory: they are read slice by slice, and at most one slice is in memory."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from grpo_core.system.tables import read_ipc

SLICE_ROWS = 100_000  # most rows per slice
SLICE_BYTES = 2**26  # bytes per slice, estimated from the file's size
AT_ONCE = 2**28  # most bytes in memory of a data set that is written as one table
GROUP = 1024  # rows per group of a larger data set


class MixedKindsError(ValueError):
    """Raised for a column with values of several kinds."""


@dataclass(frozen=True)
class Rows:
    """Rows that can be read again and again, in the same slices. `empty`: their columns, without rows; `read`: gives
    the slices, with these columns."""

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
        """Yield the slices: at least one, which may be empty."""
        frames = self.read()
        yield next(frames, self.empty)
        yield from frames

    def numbered(self) -> Iterator[tuple[int, pl.DataFrame]]:
        """Yield the number of each slice's first row, and the slice."""
        first = 0
        for frame in self.slices():
            yield first, frame
            first += frame.height

    def map(self, change: Callable[[pl.DataFrame], pl.DataFrame]) -> Rows:
        """Apply `change`, which may change columns but not the number of rows, to each slice on reading."""
        return Rows(change(self.empty), self.height, lambda: map(change, self.slices()))

    def where(self, keep: pl.Series) -> Rows:
        """Keep the rows for which `keep` is true."""
        return Rows(
            self.empty,
            int(keep.sum()),
            lambda: (frame.filter(keep.slice(first, frame.height)) for first, frame in self.numbered()),
        )

    def gather(self, rows: pl.Series | list[int]) -> pl.DataFrame:
        """Return the rows with these numbers, in the order of the data."""
        wanted = pl.repeat(False, self.height, eager=True).scatter(rows, True)
        return pl.concat([self.empty, *self.where(wanted).slices()])


def of_frame(frame: pl.DataFrame) -> Rows:
    return Rows(frame.clear(), frame.height, lambda: frame.iter_slices(SLICE_ROWS))


def slice_rows(height: int, size: int) -> int:
    """Rows per slice for a file with `height` rows and `size` bytes."""
    return max(1, min(SLICE_ROWS, SLICE_BYTES * height // max(size, 1)))


def kept_on_disk(frames: Iterator[pl.DataFrame]) -> Rows:
    """Combine the rows of one or more frames, each column with a type that holds the values of all frames. A single
    frame stays in memory; several are in temporary files, as long as these rows are in use. Raises MixedKindsError if
    there is no such type."""
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

    def read(folder: Any = folder) -> Iterator[pl.DataFrame]:  # the default keeps the folder alive
        for file in files:
            for frame in read_ipc(file).iter_slices(SLICE_ROWS):
                yield as_columns(frame, empty)

    return Rows(empty, height, read)


def with_common_types(one: pl.DataFrame, other: pl.DataFrame) -> pl.DataFrame:
    """Columns of both frames, each with a type that holds the values of both. Raises MixedKindsError if there is
    none."""
    for column, kind in other.schema.items():
        if not alike(kind, found := one.schema.get(column, kind)):
            raise MixedKindsError(f"column {column!r} is {found} in some rows and {kind} in others")
    return pl.concat([one, other], how="diagonal_relaxed")


def as_columns(frame: pl.DataFrame, empty: pl.DataFrame) -> pl.DataFrame:
    """Convert the rows to the columns of `empty`, whose types hold their values; missing columns become null."""
    if frame.schema == empty.schema:
        return frame
    return pl.concat([empty, frame], how="diagonal_relaxed") if frame.width else empty.clear(frame.height)


def alike(one: Any, other: Any) -> bool:
    """True if some type holds the values of both these types unchanged."""
    if pl.Null in (one, other) or (one.is_numeric() and other.is_numeric()):
        return True
    if isinstance(one, pl.List) and isinstance(other, pl.List):
        return alike(one.inner, other.inner)
    if isinstance(one, pl.Struct) and isinstance(other, pl.Struct):
        kinds = {field.name: field.dtype for field in one.fields}
        return all(alike(kinds[field.name], field.dtype) for field in other.fields if field.name in kinds)
    return one == other


def write_rows(rows: Rows, path: Path) -> None:
    """Write the rows as Parquet: few as one table, many in groups of GROUP rows, so that a training reads only the
    groups that it needs."""
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
