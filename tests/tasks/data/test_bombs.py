"""Small files that hold much: what is decoded at a time stays small, or the file is refused in a sentence."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tasks.data import parquet_size, text_sources
from tasks.data.sources import Source, SourceError, load_source

ROWS = 4000


def _shared(lengths: list[int]) -> pa.Array:
    """A text of each length, stored once, for ROWS / len(lengths) rows."""
    each = ROWS // len(lengths)
    places = pa.array([place for place in range(len(lengths)) for _ in range(each)], pa.int32())
    return pa.DictionaryArray.from_arrays(places, pa.array(["x" * length for length in lengths]))


FORMS: dict[str, Callable[[pa.Array], pa.Array]] = {
    "text": lambda texts: texts,
    "messages": lambda texts: pa.ListArray.from_arrays(
        pa.array(range(ROWS + 1), pa.int32()), pa.StructArray.from_arrays([texts], ["content"])
    ),
    "maps": lambda texts: pa.MapArray.from_arrays(pa.array(range(ROWS + 1), pa.int32()), pa.array(["x"] * ROWS), texts),
}


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("lengths", [[10_000], [1] * 39 + [100_000]])
def test_rows_that_share_a_text_are_decoded_a_few_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, lengths: list[int]
) -> None:
    monkeypatch.setattr(parquet_size, "SLICE_BYTES", 2**18)
    monkeypatch.setattr(parquet_size, "MOST_BYTES", 2**20)
    path = tmp_path / "train.parquet"
    pq.write_table(pa.table({"prompt": FORMS[form](_shared(lengths))}), path, compression="zstd", store_schema=False)
    assert path.stat().st_size < 20_000
    seen = 0
    for frame in load_source(Source("data.train", str(path))).slices():
        seen += frame.height
        assert frame.estimated_size() < 1.1 * 2**20
    assert seen == ROWS


@pytest.mark.parametrize(
    ("name", "text", "fault"),
    [
        ("a.jsonl", '{"prompt": "a"}\n{"prompt": "%s"}\n', "line 2 has more than 1,000 characters, the limit"),
        ("a.jsonl", '{"prompt": "a"}\n{"prompt": "%s"}', "line 2 has more than 1,000 characters, the limit"),
        ("a.json", '[{"prompt": "a"}, {"prompt": "%s"}]', "it has more than 2,000 bytes, the limit for a list"),
        ("a.csv", "prompt\na\n%s\n", r"row 1 \(line 3\): .* more than 1,000 characters, the limit"),
        ("a.csv", 'prompt\na\n"%s\n"\n', r"row 1 \(line 3\): .* more than 1,000 characters, the limit"),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_a_line_without_end_is_refused_before_it_is_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str, fault: str, packed: bool
) -> None:
    monkeypatch.setattr(text_sources, "LONGEST_LINE", 1000)
    monkeypatch.setattr(text_sources, "LARGEST_LIST", 2000)
    monkeypatch.setattr(text_sources, "CHUNK", 100)
    before = text_sources.csv.field_size_limit(1000)
    path = tmp_path / (name + ".gz" * packed)
    content = (text % ("x" * 3000)).encode()
    path.write_bytes(gzip.compress(content) if packed else content)
    try:
        with pytest.raises(SourceError, match=fault):
            load_source(Source("data.train", str(path)))
    finally:
        text_sources.csv.field_size_limit(before)
