"""Validation of several sources: each by its own columns and rewards; a fault is named by source and row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st

from grpo_core.config.files import parse_config
from tasks.data.rows import of_frame
from tasks.data.sources import pooled, unlike_columns
from tasks.screen import Screened
from tests.command_line import run_here
from tests.rows import screen, whole
from tests.sources import two_sources


def _screened(model: Path, folder: Path, frames: dict[str, pl.DataFrame], dropped: str = "", **lines: Any) -> Screened:
    """Two sources of which some files are replaced, and keys of the second changed; `dropped`: a rule."""
    values = two_sources(model, folder)
    values["data"]["checks"] = {dropped: "drop"} if dropped else {}
    for name, frame in frames.items():
        frame.write_parquet(folder / f"{name}.parquet")
    values["data"]["sources"][1] |= lines
    return screen(parse_config(values))


def test_the_validated_rows_of_all_sources_say_where_they_come_from(model_folder: Path, tmp_path: Path) -> None:
    screened = _screened(model_folder, tmp_path, {})
    assert (screened.refused, screened.report["num_prompts"]) == (False, {"train": 40, "eval": 16})
    train = screened.kept["train"]
    assert train["source"].to_list() == ["sums"] * 24 + ["lines"] * 16
    assert train["prompt"].to_list() == [*(f"{n}+{n % 7}=" for n in range(10, 34)), *(f"{n}=" for n in range(100, 116))]
    assert train["answer"].null_count() == 16
    assert {name: part["num_prompts"] for name, part in screened.report["parts"].items()} == {
        "train/sums": 24,
        "train/lines": 16,
        "eval/sums": 10,
        "eval/lines": 6,
    }


def test_a_source_needs_the_columns_of_its_own_rewards_only(model_folder: Path, tmp_path: Path) -> None:
    shape = _screened(model_folder, tmp_path, {}, rewards=["numeric_match", "length"]).shape
    assert shape == [
        f"{name}/lines has no column 'answer', which numeric_match reads; its columns are line: "
        "set data.sources.1.columns.answer to what it should be made from"
        for name in ("train", "eval")
    ]


@pytest.mark.slow
def test_a_fault_is_named_by_source_and_row_and_only_that_row_is_dropped(model_folder: Path, tmp_path: Path) -> None:
    lines = pl.DataFrame({"line": ["1=", " ", "3="]})
    screened = _screened(model_folder, tmp_path, {"lines": lines})
    assert screened.findings.select("dataset", "row", "check").rows() == [("train/lines", 1, "blank_prompt")]
    dropped = _screened(model_folder, tmp_path, {"lines": lines}, "blank_prompt")
    assert dropped.kept["train"].filter(source="lines")["prompt"].to_list() == ["1=", "3="]
    assert dropped.report["parts"]["train/lines"] == {
        "rows_read": 3,
        "num_prompts": 2,
        "source": str(tmp_path / "lines.parquet"),
    }
    assert dropped.dropped["train"].select("source_row", "broken_rules", "source").rows() == [
        (1, "blank_prompt", "lines")
    ]


@pytest.mark.slow
def test_a_prompt_that_is_held_out_by_another_source_is_found(model_folder: Path, tmp_path: Path) -> None:
    held_out = pl.DataFrame({"line": ["7=", "11+4="]})
    found = _screened(model_folder, tmp_path, {"lines-eval": held_out}).findings
    assert found.select("dataset", "row", "check").rows() == [("train/sums", 1, "overlap")]
    assert "eval/lines row 1" in found["value"][0]


@pytest.mark.slow
def test_a_prompt_of_two_sources_comes_twice(model_folder: Path, tmp_path: Path) -> None:
    """The first source keeps it, in training and in the evaluation; the report counts them by pair."""
    both = {"lines": ["12+5=", "200=", "200=", "13+6="], "lines-eval": ["60+4=", "300="]}
    frames = {name: pl.DataFrame({"line": lines}) for name, lines in both.items()}
    screened = _screened(model_folder, tmp_path, frames, "duplicate_prompt")
    twice = screened.findings.filter(check="duplicate_prompt")
    assert twice.select("dataset", "row", "value").rows() == [
        ("train/lines", 0, "12+5= (train/sums row 2)"),
        ("train/lines", 2, "200="),
        ("train/lines", 3, "13+6= (train/sums row 3)"),
        ("eval/lines", 0, "60+4= (eval/sums row 0)"),
    ]
    assert screened.report["shared"] == [
        {"dataset": "eval/lines", "other": "eval/sums", "check": "duplicate_prompt", "rows": 1},
        {"dataset": "train/lines", "other": "train/sums", "check": "duplicate_prompt", "rows": 2},
    ]
    assert screened.kept["train"].filter(source="lines")["prompt"].to_list() == ["200="]


@pytest.mark.slow
def test_columns_of_the_same_name_need_types_that_go_together(model_folder: Path, tmp_path: Path) -> None:
    frame = pl.DataFrame({"line": ["1=", "2="], "answer": [1, 2]})
    [problem] = _screened(model_folder, tmp_path, {"lines": frame}).shape
    assert problem.startswith("column 'answer' is String in train/sums, Int64 in train/lines: give it one type")
    assert not _screened(
        model_folder, tmp_path, {"lines": frame}, columns={"prompt": "line", "answer": "{answer}"}
    ).refused


def test_text_and_conversations_do_not_go_together(model_folder: Path, tmp_path: Path) -> None:
    [*problems] = _screened(model_folder, tmp_path, {}, system_prompt="Be brief.").shape
    assert (
        "the prompts of train/sums are text, those of train/lines conversations; they have to be the same"
        in problems[0]
    )


@pytest.mark.slow
def test_a_further_set_is_made_as_the_source_that_it_names(model_folder: Path, tmp_path: Path) -> None:
    values = two_sources(model_folder, tmp_path)
    pl.DataFrame({"line": ["300=", "301="]}).write_parquet(tmp_path / "more.parquet")
    values["evaluation"] = {"sets": [{"name": "more", "data": str(tmp_path / "more.parquet"), "source": "lines"}]}
    kept = screen(parse_config(values)).kept["eval-more"]
    assert kept.select("prompt", "source").rows() == [("300=", "lines"), ("301=", "lines")]


VALUES = st.sampled_from([[1, 2], [1.5], ["a"], [None], [["a"]], [[{"role": "user", "content": "x"}]], [True]])


@pytest.mark.slow
@given(st.lists(VALUES, min_size=1, max_size=3))
def test_rows_are_pooled_without_a_change_of_their_values_or_refused(columns: list[list[Any]]) -> None:
    parts = {f"train/{n}": of_frame(pl.DataFrame({"x": values})) for n, values in enumerate(columns)}
    if not [*unlike_columns(parts)]:
        assert whole(pooled(parts)["train"])["x"].to_list() == [value for values in columns for value in values]


@pytest.mark.parametrize("source", ["sums", "lines"])
def test_an_environment_is_written_beside_the_prompts_of_its_source(source: str, tmp_path: Path) -> None:
    from tasks.data.sources import load_training_prompts

    values = two_sources(tmp_path, tmp_path)
    values["data"]["sources"][["sums", "lines"].index(source)]["environment"] = "maze"
    values["environment"] = {"environment_factory": {"maze": "m:Maze"}}
    frames = [whole(rows) for rows in load_training_prompts(parse_config(values).data).values()]
    named = [frame["environment"].unique().to_list() for frame in frames if "environment" in frame.columns]
    assert named == [["maze"]]


def _grpo(config: Path, values: dict[str, Any], *arguments: str) -> tuple[int, str]:
    config.write_text(tomli_w.dumps(values))
    done = run_here(*arguments)
    return done.returncode, " ".join((done.stdout + done.stderr).split())


@pytest.mark.slow
def test_commands_ask_about_one_source_or_count_all(model_folder: Path, tmp_path: Path) -> None:
    config, values = tmp_path / "two.toml", two_sources(model_folder, tmp_path)
    status, said = _grpo(config, values, "data", "schema", str(config))
    assert (status, "choose one by --source, one of sums, lines" in said) == (2, True)
    status, said = _grpo(config, values, "data", "schema", str(config), "--source", "lines")
    assert (status, "line:" in said, "answer:" in said) == (0, True, False)
    status, said = _grpo(config, values, "plan", str(config), "--num-prompts", "100")
    assert (status, "--num-prompts: each of data.sources has its own number of prompts" in said) == (2, True)
    status, said = _grpo(config, values, "rewards", "try", str(config), "--row", "24", "--completion", "12")
    assert (status, "prompt: '100='" in said) == (0, True)
    status, said = _grpo(config, values, "rewards", "try", str(config), "--row", "40", "--completion", "12")
    assert (status, "data.sources.0.train, data.sources.1.train has 40 rows, counted from 0" in said) == (2, True)
