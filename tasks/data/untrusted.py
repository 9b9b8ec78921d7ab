"""What a stranger's data set could make this machine do on reading, and how that is refused.

The card of a data set on the Hugging Face hub names its files. An entry of its `data_files` may be any address, which
datasets asks, from this machine and so from inside its network, before it finds that the file is not the data set's.

A Parquet file stores a text that many rows share once, so that a kilobyte may hold gigabytes; what its metadata says of
sizes is whatever its writer wrote.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tasks.data.rows import SLICE_BYTES

CARD, STANDALONE = "README.md", ".huggingface.yaml"  # where datasets looks for the metadata


class ForeignFilesError(ValueError):
    """Raised if a data set's card names files outside of the hub; the message names one."""


def checked_revision(name: str, revision: str | None) -> str | None:
    """Return the commit of the data set's revision whose card has been looked at, or the revision itself if the hub
    cannot be reached, since datasets then takes what it has kept. Raises ForeignFilesError if the card names files
    outside of the hub, and the hub's errors."""
    import httpx2
    import yaml
    from huggingface_hub import DatasetCard, HfApi
    from huggingface_hub.errors import OfflineModeIsEnabled, RemoteEntryNotFoundError

    hub = HfApi()
    try:
        commit = hub.dataset_info(name, revision=revision).sha
    except (OfflineModeIsEnabled, httpx2.TransportError):
        return revision
    for file in (CARD, STANDALONE):
        try:
            path = Path(hub.hf_hub_download(name, file, repo_type="dataset", revision=commit))
        except RemoteEntryNotFoundError:
            continue
        metadata = DatasetCard.load(path).data.to_dict() if file == CARD else yaml.safe_load(path.read_text())
        for text in _texts((metadata or {}).get("configs")):
            if text.startswith("/") or ("://" in text.removeprefix("hf://datasets/")):
                raise ForeignFilesError(
                    f"{file} names {text!r}, which is not in the data set: download what you need of it, and give the "
                    "files' paths"
                )
    return commit


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for inside in value.values() if isinstance(value, dict) else value:
            yield from _texts(inside)


MOST_BYTES = 4 * SLICE_BYTES  # decoded, at a time, unless one row alone has more
BUFFER = 2**20  # bytes of a column read at a time


def decodable_rows(path: Path, at_once: int) -> int:
    """Return `at_once`, or fewer rows if that many have more than MOST_BYTES anywhere in the file. Raises pyarrow's
    errors and OSError."""
    while at_once > 1 and (largest := _largest_batch(path, at_once)) > MOST_BYTES:
        at_once = min(at_once - 1, max(1, at_once * SLICE_BYTES // largest))
    return at_once


def _largest_batch(path: Path, at_once: int) -> int:
    """Bytes of the largest batch of `at_once` rows once it is decoded, or more. Each text is read once per row group,
    however many rows share it: pyarrow does not join what two groups share of a nested column."""
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        columns = [file.schema.column(place) for place in range(len(file.schema))]
    texts = [it.path for it in columns if it.physical_type == "BYTE_ARRAY" and it.logical_type.type != "DECIMAL"]
    with pq.ParquetFile(path, buffer_size=BUFFER, read_dictionary=texts) as file:
        sizes, first = Counter[int](), 0  # by batch
        for group in range(file.num_row_groups):
            for part in file.iter_batches(batch_size=at_once, row_groups=[group]):
                size, last = sum(map(_decoded_bytes, part.columns)), first + part.num_rows - 1
                sizes.update(dict.fromkeys(range(first // at_once, last // at_once + 1), size))
                first = last + 1
    return max(sizes.values(), default=0)


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
