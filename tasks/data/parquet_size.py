"""How many rows of a Parquet file may be decoded at a time. A text that many rows share is stored once, so a file of a
kilobyte may hold gigabytes; what its metadata says of sizes is whatever its writer wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tasks.data.rows import SLICE_BYTES

MOST_BYTES = 4 * SLICE_BYTES  # decoded, at a time, unless one row alone has more
BUFFER = 2**20  # bytes of a column read at a time


def decodable_rows(path: Path, at_once: int) -> int:
    """Return `at_once`, or fewer rows if that many have more than MOST_BYTES anywhere in the file. Raises pyarrow's
    errors and OSError."""
    while at_once > 1 and (largest := _largest_batch(path, at_once)) > MOST_BYTES:
        at_once = min(at_once - 1, max(1, at_once * SLICE_BYTES // largest))
    return at_once


def _largest_batch(path: Path, at_once: int) -> int:
    """Bytes of the largest batch of `at_once` rows once it is decoded. Each text is read once, however many rows share
    it."""
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        columns = [file.schema.column(place) for place in range(len(file.schema))]
    texts = [it.path for it in columns if it.physical_type == "BYTE_ARRAY" and it.logical_type.type != "DECIMAL"]
    with pq.ParquetFile(path, buffer_size=BUFFER, read_dictionary=texts) as file:
        batches = file.iter_batches(batch_size=at_once)
        return max((sum(map(_decoded_bytes, batch.columns)) for batch in batches), default=0)


def _decoded_bytes(column: Any) -> int:
    import pyarrow as pa
    import pyarrow.compute as pc

    if isinstance(column, pa.DictionaryArray):
        return pc.sum(pc.binary_length(column.dictionary).take(column.indices)).as_py() or 0
    if isinstance(column, pa.StructArray):
        return sum(map(_decoded_bytes, column.flatten()))
    if isinstance(column, pa.MapArray):
        entries = pa.StructArray.from_arrays([column.keys, column.items], ["key", "value"])  # of the whole, not a slice
        column = pa.ListArray.from_arrays(column.offsets, entries)
    if isinstance(column, (pa.ListArray, pa.LargeListArray, pa.FixedSizeListArray)):
        return _decoded_bytes(column.flatten())
    return column.nbytes
