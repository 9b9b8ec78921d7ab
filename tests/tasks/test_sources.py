"""Every form of source gives the same rows; one that cannot be read is named with its key."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import polars as pl
import pytest

from tasks.sources import SourceError, count_prompts, list_pass_rates, load_source

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
    source = ("data.train", str(tmp_path / name), "train")
    assert load_source(*source).to_dicts() == ROWS
    assert count_prompts(*source) == 2


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("gone.parquet", None, "no such file"),
        ("broken.parquet", b"not parquet", "cannot be read as .parquet"),
        ("broken.jsonl", b'{"prompt": "1"}\n{"prompt":', "cannot be read as .jsonl"),
        ("empty.jsonl", b"", "cannot be read as .jsonl"),
        ("broken.json", b'[{"prompt": "1"}', "cannot be read as .json"),
        ("latin.csv", "prompt\ncafé\n".encode("latin-1"), "cannot be read as .csv"),
        ("latin.jsonl", '{"prompt": "café"}\n'.encode("latin-1"), "cannot be read as .jsonl"),
        ("mixed.jsonl", b'{"answer": "11"}\n{"answer": ["11"]}\n', "a column holds values of one kind"),
        ("mixed.jsonl", b'{"answer": true}\n{"answer": "yes"}\n', "a column holds values of one kind"),
        ("mixed.json", b'[{"answer": "11"}, {"answer": ["11"]}]', "cannot be read as .json"),
        ("empty_folder", None, "a source is a file ending in"),
    ],
)
def test_an_unreadable_source_is_named_with_its_key(
    tmp_path: Path, name: str, content: bytes | None, message: str
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    if name == "empty_folder":
        path.mkdir()
    with pytest.raises(SourceError) as error:
        load_source("data.train", str(path), "train")
    assert message.lower() in str(error.value).lower()
    assert "data.train" in str(error.value)


def test_messages_whose_contents_are_of_two_kinds_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"
    contents: list[Any] = ["1+1=", [{"type": "text", "text": "1+1="}]]
    path.write_text("".join(json.dumps({"prompt": [{"role": "user", "content": c}]}) + "\n" for c in contents))
    with pytest.raises(SourceError, match="a column holds values of one kind"):
        load_source("data.train", str(path), "train")


@pytest.mark.parametrize("name", ["a[1].jsonl", "a*.jsonl", "a[1].csv", "a*.parquet"])
def test_a_name_is_that_of_one_file(tmp_path: Path, name: str) -> None:
    frame = pl.DataFrame(ROWS)
    write = {".jsonl": frame.write_ndjson, ".csv": frame.write_csv, ".parquet": frame.write_parquet}[Path(name).suffix]
    for other in (name, f"a1{Path(name).suffix}"):
        write(tmp_path / other)
    assert load_source("data.train", str(tmp_path / name), "train").height == 2


def test_encoded_columns_are_read_and_those_that_nothing_can_hold_are_left_out(tmp_path: Path) -> None:
    pl.DataFrame(ROWS).with_columns(
        pl.col("answer").cast(pl.Categorical), pair=pl.Series([[1, 2], [3, 4]], dtype=pl.Array(pl.Int64, 2))
    ).write_parquet(tmp_path / "a.parquet")
    loaded = load_source("data.train", str(tmp_path / "a.parquet"), "train")
    assert loaded.schema == {"prompt": pl.String, "answer": pl.String, "pair": pl.List(pl.Int64)}
    (tmp_path / "a.jsonl").write_text('{"prompt": "1", "meta": {}}\n{"prompt": "2", "meta": {}}\n')
    assert load_source("data.train", str(tmp_path / "a.jsonl"), "train").columns == ["prompt"]


def test_pass_rates_are_a_column_that_may_be_absent(tmp_path: Path) -> None:
    source = ("data.train", str(tmp_path / "train.parquet"), "train")
    for column, expected in (({"pass_rate": [0.25, None]}, [0.25]), ({"pass_rate": [[1], [2]]}, []), ({}, [])):
        pl.DataFrame({"prompt": ["1", "2"], **column}).write_parquet(source[1])
        assert list_pass_rates(*source) == expected
