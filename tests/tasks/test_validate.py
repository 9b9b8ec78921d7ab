"""Each kind of bad data is refused, every failure at once, with row, column, rule and value."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pandas as pd
import pytest

from grpo_core.config import RunConfig, parse_config
from tasks.sources import load_source
from tasks.stage import StageError
from tasks.validate import check
from tests.conftest import config_values

Frames = dict[str, pd.DataFrame]


@pytest.fixture
def config(model_folder: Path, tmp_path: Path) -> RunConfig:
    return parse_config(config_values(model_folder, tmp_path))


def _frames() -> Frames:
    def sums(first: int, last: int) -> pd.DataFrame:
        numbers = range(first, last)
        frame = {"prompt": [f"{n}+1=" for n in numbers], "answer": [str(n + 1) for n in numbers]}
        return pd.DataFrame(frame).astype(object)

    return {"train": sums(10, 20), "eval": sums(30, 35)}


def _set(dataset: str, row: int, column: str, value: Any) -> Callable[[Frames], None]:
    def mutate(frames: Frames) -> None:
        frames[dataset].at[row, column] = value

    return mutate


def _drop(dataset: str, column: str) -> Callable[[Frames], None]:
    def mutate(frames: Frames) -> None:
        frames[dataset] = frames[dataset].drop(columns=column)

    return mutate


def test_sound_data_passes(config: RunConfig) -> None:
    assert check(_frames(), config) == []


@pytest.mark.parametrize(
    ("mutate", "dataset", "row", "column", "rule"),
    [
        (_set("train", 3, "prompt", None), "train", 3, "prompt", "is not null"),
        (_set("train", 3, "prompt", "  \n"), "train", 3, "prompt", "is not blank"),
        (_set("train", 3, "prompt", 12), "train", 3, "prompt", "is text, or a list"),
        (_set("eval", 2, "answer", None), "eval", 2, "answer", "is not null"),
        (_set("eval", 2, "answer", ""), "eval", 2, "answer", "is not blank (needed by numeric_match)"),
        (_set("eval", 4, "prompt", "10+1="), "eval", 4, "prompt", "does not appear in train"),
        (_set("train", 0, "prompt", "1+" * 40 + "1="), "train", 0, "prompt", "at most 58 tokens"),
        (_drop("train", "answer"), "train", None, "answer", "the column is there"),
        (_drop("eval", "prompt"), "eval", None, "prompt", "the column is there"),
        (lambda frames: frames.update(eval=frames["eval"].head(0)), "eval", None, None, "has at least one row"),
    ],
)
def test_a_single_fault_is_found_and_placed(
    config: RunConfig,
    mutate: Callable[[Frames], None],
    dataset: str,
    row: int | None,
    column: str | None,
    rule: str,
) -> None:
    frames = _frames()
    mutate(frames)
    failures = check(frames, config)
    assert len(failures) == 1
    assert (failures[0]["dataset"], failures[0]["row"], failures[0]["column"]) == (dataset, row, column)
    assert rule in failures[0]["check"]


def test_all_faults_are_reported_together(config: RunConfig) -> None:
    frames = _frames()
    for mutate in (_set("train", 1, "prompt", ""), _set("train", 7, "answer", None), _set("eval", 0, "prompt", 5)):
        mutate(frames)
    assert {(f["dataset"], f["row"], f["column"]) for f in check(frames, config)} == {
        ("train", 1, "prompt"),
        ("train", 7, "answer"),
        ("eval", 0, "prompt"),
    }


@pytest.mark.parametrize(
    "prompt",
    [
        [{"role": "user"}],
        [{"role": "robot", "content": "1+1="}],
        [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}],
        [],
    ],
)
def test_malformed_conversations_are_refused(config: RunConfig, prompt: list[dict[str, str]]) -> None:
    frames = {
        name: frame.assign(prompt=[[{"role": "user", "content": p}] for p in frame["prompt"]])
        for name, frame in _frames().items()
    }
    frames["train"].at[2, "prompt"] = prompt
    assert [(f["dataset"], f["row"]) for f in check(frames, config)] == [("train", 2)]


def test_text_and_conversations_do_not_mix(config: RunConfig) -> None:
    frames = _frames()
    frames["train"].at[2, "prompt"] = [{"role": "user", "content": "1+1="}]
    failures = check(frames, config)
    assert [(f["dataset"], f["row"], f["check"]) for f in failures] == [
        ("train", 2, "is text, like the first prompt of train")
    ]


def test_the_columns_asked_for_are_those_of_the_configured_rewards(model_folder: Path, tmp_path: Path) -> None:
    values = config_values(model_folder, tmp_path)
    values["rewards"] = [{"function": "length", "args": {"target": 3}}]
    frames = {name: frame.drop(columns="answer") for name, frame in _frames().items()}
    assert check(frames, parse_config(values)) == []


ROWS = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "007+1=", "answer": "NA"}]


def _write_hub_folder(path: Path) -> None:
    datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}).save_to_disk(path)


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("a.parquet", lambda path: pd.DataFrame(ROWS).to_parquet(path)),
        ("a.jsonl", lambda path: path.write_text("\n".join(map(json.dumps, ROWS)) + "\n\n")),
        ("a.json", lambda path: path.write_text(json.dumps(ROWS))),
        ("a.csv", lambda path: pd.DataFrame(ROWS).to_csv(path, index=False)),
        ("saved", _write_hub_folder),
    ],
)
def test_every_form_of_source_gives_the_same_rows(tmp_path: Path, name: str, write: Callable[[Path], Any]) -> None:
    write(tmp_path / name)
    assert load_source("data.train", str(tmp_path / name), "train").to_dict("records") == ROWS


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("gone.parquet", None, "no such file"),
        ("broken.parquet", b"not parquet", "cannot be read as .parquet"),
        ("broken.jsonl", b'{"prompt": "1"}\n{"prompt":', "cannot be read as .jsonl"),
        ("latin.csv", "prompt\ncafé\n".encode("latin-1"), "cannot be read as .csv"),
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
    with pytest.raises(StageError) as error:
        load_source("data.train", str(path), "train")
    assert message.lower() in str(error.value).lower()
    assert "data.train" in str(error.value)
