"""Every form of source gives the same rows; one that cannot be read is named with its key."""

from __future__ import annotations

import array
import csv
import gzip
import io
import itertools
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import datasets
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_core.config.files import parse_config
from grpo_core.config.inputs import DataConfig
from tasks.data.sources import (
    Source,
    SourceError,
    count_prompts,
    list_pass_rates,
    load_source,
    load_sources,
    needs_loading,
    without_unstorable,
)
from tasks.data.text_sources import BLOCK
from tests.conftest import config_values
from tests.rows import whole

ROWS = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "007+1=", "answer": "NA"}]


def _write_hub_folder(path: Path) -> None:
    datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}).save_to_disk(path)


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("a.parquet", lambda path: pl.DataFrame(ROWS).write_parquet(path)),
        ("a.jsonl", lambda path: path.write_text("\n".join(map(json.dumps, ROWS)) + "\n\n")),
        ("a.json", lambda path: path.write_text(json.dumps(ROWS))),
        ("a.csv", lambda path: path.write_text("\ufeffprompt,answer\n1+1=,2\n007+1=,NA\n")),
        ("saved", _write_hub_folder),
    ],
)
def test_every_form_of_source_gives_the_same_rows(tmp_path: Path, name: str, write: Callable[[Path], Any]) -> None:
    write(tmp_path / name)
    source = Source("data.train", str(tmp_path / name))
    assert whole(load_source(source)).to_dicts() == ROWS
    assert count_prompts(source) == 2


GOOD = b'{"prompt": "1", "answer": "2"}\n'


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("broken.parquet", b"not parquet", "cannot be read as .parquet"),
        ("empty.jsonl", b"", "it has no rows"),
        ("empty.json", b" ", "it has no rows"),
        ("none.json", b"[]", "it has no rows"),
        ("empty.csv", b"\n", "it has no rows"),
        (
            "cut.jsonl",
            3 * GOOD + b'{"prompt": "1", "ans',
            "row 3 (line 4): not JSON: unterminated string; found '\"ans'",
        ),
        ("cut.json", b'[{"prompt": "1"}', "after row 0 comes the end of the file"),
        ("cut.jsonl.gz", gzip.compress(1000 * GOOD, mtime=0)[:60], "it is compressed by gzip, but damaged"),
        ("colon.jsonl", GOOD + b'{"prompt" "1"}', "row 1 (line 2): not JSON: expecting ':' delimiter; found '\"1\"}'"),
        ("twice.jsonl", GOOD + b'\n{"prompt": "1", "prompt": "2"}', "row 1 (line 3): the name 'prompt' is given twice"),
        ("twice.csv", b"prompt,prompt\n1,2\n", "header: the column 'prompt' appears twice"),
        ("latin.jsonl", 4 * GOOD + b'{"prompt": "\xff"}', "row 4 (line 5): byte 13 of it is not UTF-8: b'\\xff'"),
        ("latin.json", b'[{"prompt": "1"}, {"prompt": "\xff"}]', "row 1: byte 13 of it is not UTF-8"),
        ("latin.csv", b"prompt\n1\n\xff\n", "line 3: not UTF-8: b'\\xff'"),
        ("infinite.jsonl", b'{"a": 1.5}\n{"a": -Infinity}', "row 1 (line 2): -Infinity is not JSON; write null"),
        ("huge.json", b'[{"a": ' + 60 * b"9" + b"}]", "row 0: an integer of 60 digits is beyond what a column holds"),
        ("huge.jsonl", b'{"a": 1e999}', "row 0 (line 1): 1e999 is beyond any number that a column holds"),
        ("half.json", b'[{"a": "\\ud800"}]', "row 0: column 'a' has half a character: \\ud800 without its pair"),
        ("deep.json", b"[" * 10**5, "row 0: nested too deeply"),
        ("deep.jsonl", GOOD + b'{"a":' * 600 + b"1" + b"}" * 600, "row 1 (line 2): nested too deeply: more than 100"),
        ("deeper.jsonl", b'{"a": "[", "b":' + b"[" * 10**5 + b"]" * 10**5 + b"}", "row 0 (line 1): nested too deeply"),
        ("objects.json", b'[{"a": 1},' + b'{"a":' * 600 + b"1" + b"}" * 600 + b"]", "row 1: nested too deeply"),
        ("comma.json", b'[{"a": 1}, ]', "row 1: not JSON: something has to follow a comma; found ']'"),
        ("comma.jsonl", b'{"a": 1,}', "row 0 (line 1): not JSON: something has to follow a comma; found '}'"),
        ("commas.jsonl", b'{"a": 1},\n{"a": 2}', "row 0 (line 1): not JSON: nothing may follow the object"),
        ("lines.json", 2 * GOOD, "for an object on each line use the ending .jsonl"),
        ("more.json", b'[{"a": 1}] x', "after row 0 comes '] x'"),
        ("number.json", b'[{"a": 1}, 5]', "row 1: it is a number, not an object"),
        ("semicolons.csv", b"prompt;answer\na;b, c\n", "fields are separated by commas, not by ';'"),
        ("ragged.csv", b'prompt,answer\n1,2\n"3\n4",5\n6,7,8\n', "row 2 (line 5): 3 fields, but the header has 2"),
        ("quote.csv", b'prompt,answer\n1,2\n"3,4\n5,6\n', "row 1 (line 3): a quote is opened and never closed"),
        ("quotes.csv", b'prompt\n"say \\"hi\\""\n', "row 0 (line 2): no comma follows a closing quote"),
        ("a.tsv", b"prompt\n1\n", "a file of unknown kind; a source is a file ending in"),
        ("empty_folder", None, "a source is a file ending in"),
    ],
)
def test_an_unreadable_source_is_named_with_its_key_and_the_first_row_at_fault(
    tmp_path: Path, name: str, content: bytes | None, message: str
) -> None:
    path = tmp_path / name
    path.mkdir() if content is None else path.write_bytes(content)
    with pytest.raises(SourceError) as error:
        load_source(Source("data.train", str(path)))
    assert message in str(error.value)
    assert str(error.value).startswith(f"data.train = {str(path)!r}")


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_brackets_in_texts_are_no_nesting(tmp_path: Path, name: str) -> None:
    rows = [{"prompt": '[{"' * 500, "answer": "\\"}, {"prompt": "[" * 101, "answer": '"' + "{" * 101}]
    (tmp_path / name).write_text(json.dumps(rows) if name == "a.json" else "\n".join(map(json.dumps, rows)))
    assert whole(load_source(Source("data.train", str(tmp_path / name)))).to_dicts() == rows


def test_a_small_file_that_decompresses_to_a_giant_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(1000 * GOOD))
    monkeypatch.setattr("tasks.data.text_sources.LARGEST", 1000 * len(GOOD) - 1)
    with pytest.raises(SourceError, match="decompressed it has more than 30,999 bytes"):
        load_source(Source("data.train", str(path)))
    monkeypatch.setattr("tasks.data.text_sources.LARGEST", 1000 * len(GOOD))
    assert load_source(Source("data.train", str(path))).height == 1000


@pytest.mark.slow
def test_a_file_that_does_not_fit_into_memory_is_refused_in_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "a.json.gz"
    path.write_bytes(gzip.compress(bytes(2**28), 1))
    program = (
        "import resource, sys\n"
        "from tasks.data.sources import Source, SourceError, load_source\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + 2**27,) * 2)\n"
        "try: load_source(Source('data.train', sys.argv[1]))\n"
        "except SourceError as error: print(error)"
    )
    ran = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=False)
    assert "it does not fit into this machine's memory" in ran.stdout, ran.stderr


@pytest.mark.parametrize("source", ["a" * 5000, "a" * 5000 + "/b", "b/" + "a" * 5000 + ".jsonl"])
def test_a_source_with_a_name_too_long_for_any_file_is_not_there(source: str) -> None:
    assert not needs_loading(source)
    with pytest.raises(SourceError, match="no such file or folder"):
        load_source(Source("data.train", source))


@pytest.mark.parametrize(
    "source",
    ["gone.parquet", "gone.JSONL", "gone.jsonl.gz", "gone.txt", "./gone", "../a/b", "/a/b", "a/b/c", "here/gone"],
)
def test_what_looks_like_a_path_is_not_taken_for_a_dataset_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("here").mkdir()
    with pytest.raises(SourceError, match="no such file or folder"):
        load_source(Source("data.train", source))


def test_a_name_that_is_no_path_is_looked_for_on_the_hub() -> None:
    with pytest.raises(SourceError, match=r"data\.train = 'owner/v1\.0-data', split 'train': "):
        load_source(Source("data.train", "owner/v1.0-data"))


def _as_csv(rows: list[dict[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


CHARACTERS = st.characters(exclude_categories=["Cs"])
# Values of each kind, and texts that a careless reader takes for another kind.
KINDS: dict[str, st.SearchStrategy[Any]] = {
    "text": st.text(CHARACTERS, max_size=5) | st.sampled_from(["5", "true", "null", "2024-01-01", "NaN", "[1]"]),
    "number": st.integers(-(2**63), 2**63 - 1) | st.integers(-9, 9),
    "float": st.floats(allow_nan=False, allow_infinity=False),
    "flag": st.booleans(),
    "texts": st.lists(st.text("ab", max_size=2), min_size=1, max_size=2),
    "numbers": st.lists(st.integers(-9, 9), min_size=1, max_size=2),
    "object": st.fixed_dictionaries({"x": st.text("ab", max_size=2), "y": st.integers(0, 9)}),
}


@pytest.mark.slow
@given(
    kind=st.sampled_from(list(KINDS)),
    alien=st.none() | st.sampled_from([*KINDS, "NaN"]),
    place=st.integers(0, 5),
    data=st.data(),
)
def test_json_and_json_lines_of_the_same_rows_get_the_same_verdict(
    kind: str, alien: str | None, place: int, data: st.DataObject
) -> None:
    """A column of one kind is read as it stands (of whole numbers and fractions: as fractions); the first value of
    another kind is refused with its row."""
    values = data.draw(st.lists(KINDS[kind] | st.none(), min_size=3, max_size=6))
    values[1] = data.draw(KINDS[kind])
    row = min(2 + place, len(values) - 1)
    if alien:
        values[row] = math.nan if alien == "NaN" else data.draw(KINDS[alien])
    rows = [{"prompt": "q", "answer": value} for value in values]
    numeric = {"number", "float"}
    refused = alien not in (None, kind) and not {kind, alien} <= numeric
    read = [float(v) if v is not None and {kind, alien} == numeric else v for v in values]
    with tempfile.TemporaryDirectory() as folder:
        lines, listed = Path(folder, "a.jsonl"), Path(folder, "A.JSON")
        lines.write_text("".join(json.dumps(each) + "\n" for each in rows))
        listed.write_text(json.dumps(rows, ensure_ascii=False, indent=1))
        for path in (lines, listed):
            if refused:
                with pytest.raises(SourceError, match=rf": row {row}\b"):
                    load_source(Source("data.train", str(path)))
            else:
                assert whole(load_source(Source("data.train", str(path))))["answer"].to_list() == read


@pytest.mark.slow
@given(
    rows=st.lists(
        st.fixed_dictionaries({name: st.text(CHARACTERS, min_size=1, max_size=6) for name in ("prompt", "b")}),
        min_size=1,
        max_size=4,
    )
)
def test_rows_of_text_are_the_same_in_every_file(rows: list[dict[str, str]]) -> None:
    written: dict[str, Callable[[Path], Any]] = {
        "a.parquet": lambda path: pl.DataFrame(rows).write_parquet(path),
        "a.jsonl.gz": lambda path: path.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode())),
        "a.Json": lambda path: path.write_text("\ufeff" + json.dumps(rows)),
        "a.csv": lambda path: path.write_text(_as_csv(rows), newline=""),
    }
    with tempfile.TemporaryDirectory() as folder:
        for name, write in written.items():
            write(Path(folder, name))
            source = Source("data.train", str(Path(folder, name)))
            assert whole(load_source(source)).to_dicts() == rows
            assert count_prompts(source) == len(rows)


@pytest.mark.slow
def test_a_line_longer_than_a_block_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "x" * (BLOCK + 1)}) + "\n" + json.dumps({"prompt": "y"}))
    assert load_source(Source("data.train", str(tmp_path / "a.jsonl"))).height == 2


@pytest.mark.parametrize("name", ["a[1].jsonl", "a*.jsonl", "a[1].csv", "a*.parquet"])
def test_a_name_is_that_of_one_file(tmp_path: Path, name: str) -> None:
    frame = pl.DataFrame(ROWS)
    write = {".jsonl": frame.write_ndjson, ".csv": frame.write_csv, ".parquet": frame.write_parquet}[Path(name).suffix]
    for other in (name, f"a1{Path(name).suffix}"):
        write(tmp_path / other)
    assert load_source(Source("data.train", str(tmp_path / name))).height == 2


def test_encoded_columns_are_read_and_those_that_nothing_can_hold_are_left_out(tmp_path: Path) -> None:
    pl.DataFrame(ROWS).with_columns(
        pl.col("answer").cast(pl.Categorical), pair=pl.Series([[1, 2], [3, 4]], dtype=pl.Array(pl.Int64, 2))
    ).write_parquet(tmp_path / "a.parquet")
    loaded = load_source(Source("data.train", str(tmp_path / "a.parquet")))
    assert loaded.schema == {"prompt": pl.String, "answer": pl.String, "pair": pl.List(pl.Int64)}
    (tmp_path / "a.jsonl").write_text('{"prompt": "1", "meta": {}}\n{"prompt": "2", "meta": {}}\n')
    assert without_unstorable(load_source(Source("data.train", str(tmp_path / "a.jsonl")))).columns == ["prompt"]


ODD = b"caf\xc3\xa9 \xff"


def _odd_text(*texts: bytes) -> pa.Array:
    """Texts that may be no UTF-8, as other programs write them."""
    ends = list(itertools.accumulate(map(len, texts), initial=0))
    return pa.Array.from_buffers(
        pa.string(), len(texts), [None, pa.py_buffer(array.array("i", ends)), pa.py_buffer(b"".join(texts))]
    )


def test_columns_that_nothing_reads_never_fail(tmp_path: Path) -> None:
    instants = pa.array([0, None], pa.timestamp("us", "+05:30"))
    texts = _odd_text(ODD, b"")
    columns = {
        **{name: [row[name] for row in ROWS] for name in ("prompt", "answer")},
        "asked": instants,
        "asked_in": pa.StructArray.from_arrays([instants, pa.ListArray.from_arrays([0, 1, 2], texts)], ["at", "by"]),
        "noted": texts,
        "kind": pa.array(["odd", "even"]).dictionary_encode(),
        "wide": pa.array([Decimal(10) ** 50, None], pa.decimal256(60)),
    }
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    loaded = whole(load_source(Source("data.train", str(tmp_path / "a.parquet"))))
    assert loaded.select("prompt", "answer").to_dicts() == ROWS
    at = datetime(1970, 1, 1, tzinfo=UTC)
    first = {"asked": at, "asked_in": {"at": at, "by": ["café \ufffd"]}, "noted": "café \ufffd", "kind": "odd"}
    assert loaded.drop("prompt", "answer").to_dicts()[0] == {**first, "wide": "1" + 50 * "0"}


def test_a_saved_data_set_keeps_its_images_encoded_and_names_its_labels(tmp_path: Path) -> None:
    features = datasets.Features(
        {
            "prompt": datasets.Value("string"),
            "answer": datasets.ClassLabel(names=["no", "yes"]),
            "shown": datasets.Image(),
            "grid": datasets.Array2D((1, 2), "int64"),
        }
    )
    rows = [
        {"prompt": "1", "answer": label, "shown": {"bytes": b"no picture", "path": None}, "grid": [[1, 2]]}
        for label in (1, 0, -1)  # -1: without a label
    ]
    datasets.Dataset.from_list(rows, features).save_to_disk(tmp_path / "saved")
    loaded = whole(load_source(Source("data.train", str(tmp_path / "saved"))))
    assert loaded["answer"].to_list() == ["yes", "no", None]
    assert (loaded["shown"][0]["bytes"], loaded["grid"].to_list()[0]) == (b"no picture", [[1, 2]])


@pytest.mark.parametrize("place", ["", "data"])
def test_a_folder_as_the_hub_keeps_it_gives_the_files_of_a_split_in_order(tmp_path: Path, place: str) -> None:
    (folder := tmp_path / "set").mkdir()
    (folder / place).mkdir(exist_ok=True)
    for number, row in enumerate(ROWS):
        pl.DataFrame([row]).write_parquet(folder / place / f"train-{number:05d}-of-00002.parquet")
    pl.DataFrame(ROWS * 2).write_parquet(folder / place / "test-00000-of-00001.parquet")
    assert whole(load_source(Source("data.train", str(folder)))).to_dicts() == ROWS
    assert count_prompts(Source("data.eval", str(folder), "test")) == 4


def test_a_split_that_a_saved_data_set_has_not_is_refused_with_those_that_it_has(tmp_path: Path) -> None:
    _write_hub_folder(tmp_path / "saved")
    with pytest.raises(SourceError, match=r"split 'test': there is none; the splits are train"):
        load_source(Source("data.eval", str(tmp_path / "saved"), "test"))


def test_a_column_that_a_file_has_twice_is_refused_by_its_name(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_arrays([pa.array([1]), pa.array([2])], ["a", "a"]), tmp_path / "a.parquet")
    with pytest.raises(SourceError, match="the column 'a' appears twice"):
        load_source(Source("data.train", str(tmp_path / "a.parquet")))


def test_pass_rates_are_a_column_that_may_be_absent(tmp_path: Path) -> None:
    path = tmp_path / "train.parquet"
    config = DataConfig(train=str(path), eval="")
    for column, expected in (({"pass_rate": [0.25, None]}, [0.25]), ({"pass_rate": [[1], [2]]}, []), ({}, [])):
        pl.DataFrame({"prompt": ["1", "2"], **column}).write_parquet(path)
        assert list_pass_rates(config) == expected
    pl.DataFrame({"prompt": ["1", "2"], "solved": [0.5, 1.0]}).write_parquet(path)
    assert list_pass_rates(DataConfig(train=str(path), eval="", columns={"pass_rate": "solved"})) == [0.5, 1.0]


def test_subset_split_and_revision_reach_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each source is asked for at its own: those of `[data]` at one, an evaluation set at its own."""
    asked: list[tuple[str, str | None, str, str | None]] = []

    def load_dataset(path: str, name: str | None, *, split: str, revision: str | None) -> datasets.Dataset:
        asked.append((path, name, split, revision))
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr("tasks.data.sources.checked_revision", lambda name, revision: revision)
    values = config_values(tmp_path, tmp_path)
    values["data"] = {"train": "owner/sums", "eval": "owner/held", "subset": "main", "revision": "v2"}
    values["evaluation"] = {"sets": [{"name": "hard", "data": "owner/hard", "revision": "abc"}]}
    load_sources(parse_config(values))
    assert asked == [
        ("owner/sums", "main", "train", "v2"),
        ("owner/held", "main", "test", "v2"),
        ("owner/hard", None, "test", "abc"),
    ]
