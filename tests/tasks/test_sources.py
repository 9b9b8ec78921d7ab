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


def test_pass_rates_are_a_column_that_may_be_absent(tmp_path: Path) -> None:
    source = ("data.train", str(tmp_path / "train.parquet"), "train")
    for column, expected in (({"pass_rate": [0.25, None]}, [0.25]), ({"pass_rate": [[1], [2]]}, []), ({}, [])):
        pl.DataFrame({"prompt": ["1", "2"], **column}).write_parquet(source[1])
        assert list_pass_rates(*source) == expected
