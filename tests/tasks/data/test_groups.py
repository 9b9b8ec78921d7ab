"""Validation of `evaluation.group_column`: what is not grouped is refused, and few groups are warned of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest

from grpo_core.config.files import parse_config
from grpo_core.system.tables import read_parquet
from tasks.data.contract import Part
from tasks.data.groups import count_groups, group_problems
from tasks.data.rows import of_frame
from tasks.validate import too_few_groups, too_few_to_promote
from tests.conftest import config_values, write_sums
from tests.rows import screen

PROMPTS = ["1=", "2=", "3=", "1="]


def problems(**columns: list[Any]) -> list[str]:
    rows = of_frame(pl.DataFrame({"prompt": PROMPTS, **columns}))
    parts = {"train": rows.where(pl.Series([True] * 4)), "eval": rows}
    return [*group_problems("passage", {name: Part(its) for name, its in parts.items()}, parts, False)]


def test_prompts_without_a_group_and_equal_ones_of_several_are_refused() -> None:
    assert problems(passage=["a", "b", "b", "a"]) == []
    assert problems(passge=[1, 2, 3, 4]) == [
        "eval has no column 'passage', which evaluation.group_column names; its columns are prompt, passge: set "
        'data.columns.passage = "passge"'
    ]
    for values in (["a", None, " ", "a"], [1.0, None, float("nan"), 1.0]):
        assert problems(passage=values) == [
            "eval: 2 of 4 prompts have no value in the column 'passage', which evaluation.group_column names; the "
            "first is row 1 of those kept. Give each prompt a group, if need be one of its own"
        ]
    assert problems(passage=["a", "b", "b", "c"]) == [
        "eval: 1 prompts are in several groups by the column 'passage', such as '1='; give equal prompts the same group"
    ]


def test_groups_are_counted_by_part_and_in_all() -> None:
    frames = {"train/a": [1], "eval/a": [1, 2, 2], "eval/b": [2, 3], "eval-hard": [4]}
    parts = {name: of_frame(pl.DataFrame({"passage": values})) for name, values in frames.items()}
    assert count_groups("passage", parts) == {"eval/a": 2, "eval": 3, "eval/b": 2, "eval-hard": 1}


@pytest.mark.slow
def test_validate_says_how_many_groups_there_are_and_warns_of_few(model_folder: Path, tmp_path: Path) -> None:
    write_sums(tmp_path / "train.parquet", 10, 34)
    path = write_sums(tmp_path / "eval.parquet", 60, 76)
    values = {**config_values(model_folder, tmp_path), "evaluation": {"group_column": "passage"}}
    assert "eval has no column 'passage'" in screen(parse_config(values)).shape[0]
    read_parquet(path).with_columns(passage=pl.int_range(16) // 4).write_parquet(path)
    config = parse_config(values)
    screened = screen(config)
    assert (screened.refused, screened.report["num_groups"]) == (False, {"eval": 4})
    [warning] = too_few_groups(config, screened.report)
    assert warning.startswith("held-out: 16 prompts are 4 groups (evaluation.group_column = 'passage')")
    assert too_few_groups(config, {**screened.report, "num_groups": {"eval": 50}}) == []
    assert too_few_groups(config, {**screened.report, "num_groups": {}}) == []
    graded = parse_config({**values, "rewards": [{"function": "char_length"}]})
    [warning] = too_few_to_promote(graded, "reward", {"held-out": 4})
    assert "with 4 groups in 'held-out' none can be promoted. Hold out 200 groups" in warning
