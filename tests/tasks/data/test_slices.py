"""Data larger than memory: what is read slice by slice gets the same verdict, and gives the same rows, as the whole.
And small files that hold much: what is decoded at a time stays small, or the file is refused in a sentence."""

from __future__ import annotations

import gzip
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from grpo_core.config.files import parse_config
from grpo_core.data.prompts import FileRows
from tasks.data import text_sources, untrusted
from tasks.data.rows import of_frame, write_rows
from tasks.data.sources import Source, SourceError, load_source
from tests.conftest import config_values
from tests.rows import screen

MODULE = """
import pandera.polars as pa


class Numbered(pa.DataFrameModel):
    prompt: str = pa.Field(nullable=True, str_length={"max_value": 60})
    number: float = pa.Field(nullable=True, unique=True)

    class Config:
        unique = ["prompt", "number"]


def as_given(row):
    return row["number"] if row["prompt"] != "3+3=" else [1]
"""
PROMPTS = ["1+1=", "2+2=", " 2+2=", "3+3=", "4+4=", "5+5=", "", "\u200b", "é", "cafÃ©=", "1+" * 40, None]
ROW = st.fixed_dictionaries(
    {"prompt": st.sampled_from(PROMPTS), "answer": st.sampled_from(["2", "4", "6", " ", None])},
    optional={
        "number": st.integers(0, 9) | st.floats(0, 9) | st.none(),
        "texts": st.sampled_from([None, [], ["a", "é\n"]]),
        "object": st.sampled_from([{"x": 1}, {"y": [2]}, None]),
        "large": st.sampled_from([1, 2**70]),
    },
)
PLAIN = {"form": "jsonl", "severity": "drop", "schema": False, "function": False, "alien": None}
ALIENS = [None, None, None, ("prompt", 5), ("answer", True), ("texts", "a"), ("object", 1), ("number", "x")]


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("rules")
    (folder / "sliced_rules.py").write_text(MODULE)
    sys.path.insert(0, str(folder))
    yield
    sys.path.remove(str(folder))


def _verdict(values: dict[str, Any]) -> Any:
    try:
        screened = screen(parse_config(values))
    except SourceError as error:
        return str(error)
    sets = {name: frame.to_dicts() for found in (screened.kept, screened.dropped) for name, frame in found.items()}
    lengths = {name: found.to_list() for name, found in screened.lengths.items()}
    # The order of columns in JSON is polars' own; so it is in the value of a finding about a whole row.
    shape = [problem.partition("; its columns are")[0] for problem in screened.shape]
    return screened.findings.drop("value").rows(), sets, lengths, {**screened.report, "shape": shape}


@pytest.mark.slow
@settings(max_examples=5, deadline=None)
@given(
    rows=st.lists(ROW, min_size=3, max_size=9),
    held_out=st.lists(ROW, min_size=1, max_size=4),
    form=st.sampled_from(["jsonl", "json", "parquet"]),
    severity=st.sampled_from(["drop", "warn", "error"]),
    schema=st.booleans(),
    function=st.booleans(),
    alien=st.sampled_from(ALIENS),
)
@example(
    rows=[{"prompt": "1+1=", "answer": "2", "number": None, "large": large} for large in (1, 1, 2**70)],
    held_out=[{"prompt": "2+2=", "answer": "4"}],
    **PLAIN | {"schema": True},
)
@example(  # no training prompt is left, and held-out ones are
    rows=[{"prompt": "1+1=", "answer": "2"}] * 3,
    held_out=[{"prompt": "1+1=", "answer": "2"}],
    **PLAIN | {"severity": "error"},
)
def test_slices_get_the_same_verdict_as_the_whole(
    model_folder: Path,
    module: None,
    rows: list[dict[str, Any]],
    held_out: list[dict[str, Any]],
    form: str,
    severity: str,
    schema: bool,
    function: bool,
    alien: tuple[str, Any] | None,
) -> None:
    """Duplicates, overlaps, gaps, prompts of other types: also those of which the first slices know nothing."""
    if alien:
        rows = [*rows[:-1], {**rows[-1], alien[0]: alien[1]}]
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        files = {kind: Path(name, f"{kind}.{form}") for kind in ("train", "eval")}
        for file, content in zip(files.values(), (rows, held_out), strict=True):
            _write(file, content)
        values = config_values(model_folder, Path(name))
        values["data"] = {kind: str(file) for kind, file in files.items()} | {
            "checks": dict.fromkeys(("missing_value", "duplicate_prompt", "overlap", "own_schema"), severity)
            | dict.fromkeys(("blank_prompt", "no_tokens", "long_prompt"), "drop" if severity == "warn" else severity),
            "columns": {"made": "sliced_rules:as_given"} if function else {},
            **({"schema": "sliced_rules:Numbered"} if schema else {}),
        }
        at_once = _verdict(values)
        for key, size in (("rows.SLICE_ROWS", 2), ("text_sources.SLICE_ROWS", 2), ("text_sources.CHUNK", 50)):
            patch.setattr(f"tasks.data.{key}", size)
        sliced = _verdict(values)
        # A refusal of a function names the rows that were called together.
        if isinstance(at_once, str) and " returns " in at_once:
            assert isinstance(sliced, str) and " returns " in sliced
        else:
            assert sliced == at_once


def _write(file: Path, rows: list[dict[str, Any]]) -> None:
    if file.suffix == ".parquet":
        names = dict.fromkeys(name for row in rows for name in row if name not in ("texts", "object", "large"))
        pl.DataFrame(
            [{n: r.get(n) for n in names} for r in rows], strict=False, infer_schema_length=None
        ).write_parquet(file, row_group_size=3)
    else:
        text = json.dumps(rows) if file.suffix == ".json" else "\n\n".join(map(json.dumps, rows))
        file.write_text(text)


def test_rows_of_a_large_file_are_read_by_groups_and_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small file is written as one table: the same bytes as ever, so that its runs stay up to date."""
    frame = pl.DataFrame({"prompt": [f"{n}=" for n in range(5000)], "tags": [["a", None]] * 5000})
    write_rows(of_frame(frame), tmp_path / "small.parquet")
    frame.write_parquet(tmp_path / "plain.parquet")
    assert (tmp_path / "small.parquet").read_bytes() == (tmp_path / "plain.parquet").read_bytes()
    monkeypatch.setattr("tasks.data.rows.AT_ONCE", 100)
    write_rows(of_frame(frame), tmp_path / "large.parquet")
    assert pq.read_metadata(tmp_path / "large.parquet").num_row_groups == 5
    rows = FileRows(tmp_path / "large.parquet")
    assert [rows[n] for n in (4999, 0, 1023, 1024)] == [frame.row(n, named=True) for n in (4999, 0, 1023, 1024)]
    assert [*rows] == frame.to_dicts() and len(rows) == 5000 and rows.group.cache_info().currsize == 3
    with pytest.raises(IndexError):
        rows[5000]


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
    monkeypatch.setattr(untrusted, "SLICE_BYTES", 2**18)
    monkeypatch.setattr(untrusted, "MOST_BYTES", 2**20)
    path = tmp_path / "train.parquet"
    table = pa.table({"prompt": FORMS[form](_shared(lengths))})
    pq.write_table(table, path, compression="zstd", store_schema=False, row_group_size=ROWS // 2)
    assert path.stat().st_size < 20_000
    seen = 0
    for frame in load_source(Source("data.train", str(path))).slices():
        seen += frame.height
        assert frame.estimated_size() < 1.1 * 2**20
    assert seen == ROWS


def test_messages_are_read_from_many_row_groups(tmp_path: Path) -> None:
    rows = [{"prompt": [{"role": "user", "content": f"{number}"}], "shown": {"bytes": b"x"}} for number in range(50)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet", row_group_size=7)
    frames = load_source(Source("data.train", str(tmp_path / "train.parquet"))).slices()
    assert pl.concat(frames).to_dicts() == rows


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
