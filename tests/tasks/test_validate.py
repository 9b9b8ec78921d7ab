"""What validate says of a promotion that is to follow: prompts too few for it, or those that chose the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from grpo_core.config.files import parse_config
from tasks.validate import too_few_to_promote
from tests.conftest import config_values, write_sums
from tests.rows import screen

GRADES = {"function": "char_length"}  # without a lowest value
RIGHT = {"function": "numeric_match"}


@pytest.mark.parametrize(
    ("rewards", "zero_or_one", "num_prompts", "promotion", "warns"),
    [
        ([GRADES], [], 199, {}, True),
        ([GRADES], [], 200, {}, False),
        ([{**GRADES, "clip": [-50, 0]}], [], 10, {}, False),
        ([{"function": "my_rewards:f"}], ["f"], 10, {}, False),
        ([{"function": "my_rewards:f"}], [], 10, {}, True),
        ([{"function": "my_rewards:f", "range": [-9, 0]}], [], 10, {}, False),
        ([RIGHT, GRADES], ["numeric_match"], 10, {}, False),
        ([RIGHT, GRADES], ["numeric_match"], 10, {"metric": "reward"}, True),
        ([GRADES], [], 10, {"metric": "accuracy"}, False),
        ([GRADES], [], 10, {"set": "other"}, False),
    ],
)
def test_held_out_prompts_that_cannot_promote_a_grade_without_range_are_named_before_the_training(
    tmp_path: Path,
    rewards: list[dict[str, Any]],
    zero_or_one: list[str],
    num_prompts: int,
    promotion: dict[str, Any],
    warns: bool,
) -> None:
    sets = {"sets": [{"name": "other", "data": "other.parquet"}]}
    values = {**config_values(tmp_path, tmp_path), "rewards": rewards, "promotion": promotion, "evaluation": sets}
    counts = {"train": 500, "eval": num_prompts, "eval-other": 300}
    warnings = too_few_to_promote(parse_config(values), counts, zero_or_one)
    assert bool(warnings) == warns
    if warns:
        name = rewards[-1]["function"].rpartition(":")[2]
        assert f"the range of '{name}' is unknown: with {num_prompts} prompts in 'held-out'" in warnings[0]


@pytest.mark.slow
def test_prompts_that_choose_the_model_may_not_judge_it_from_another_file(model_folder: Path, tmp_path: Path) -> None:
    for name, first, last in [("train", 10, 40), ("eval", 60, 70), ("final", 68, 80)]:
        write_sums(tmp_path / f"{name}.parquet", first, last)
    values = config_values(model_folder, tmp_path, load_best_model_at_end=True, eval_steps=1, save_steps=1)
    values["evaluation"]["sets"][0]["data"] = str(tmp_path / "final.parquet")
    assert screen(parse_config(values)).shape == [
        "2 prompts of eval-final are in eval too: the training chooses its model by them, so they cannot also decide "
        "on its promotion ('final'); leave them out of one of the two"
    ]
    write_sums(tmp_path / "final.parquet", 70, 80)
    assert not screen(parse_config(values)).refused
