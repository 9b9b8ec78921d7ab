"""A training is used only when it did what the plan says, with finite figures, though its process exited 0."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from grpo_core.plan import Plan, PlanInputs, make_plan
from tasks.stage import StageError
from tasks.train import check_result


@pytest.fixture
def plan() -> Plan:
    return make_plan(PlanInputs(8, 4, 8, max_completion_length=4, max_steps=3))


def _metrics(path: Path, steps: list[int], **figures: float) -> Path:
    path.write_text("".join(json.dumps({"step": step, "loss": 0.1, "reward": 0.5, **figures}) + "\n" for step in steps))
    return path


def test_a_training_that_followed_its_plan_is_accepted(plan: Plan, tmp_path: Path) -> None:
    check_result({"updates": 3}, _metrics(tmp_path / "m.jsonl", [1, 2, 3]), plan)


@pytest.mark.parametrize("updates", [0, 2, 4])
def test_another_number_of_updates_than_planned_is_refused(plan: Plan, tmp_path: Path, updates: int) -> None:
    with pytest.raises(StageError, match=f"plan says 3 updates, the training did {updates}"):
        check_result({"updates": updates}, _metrics(tmp_path / "m.jsonl", [1, 2, 3]), plan)


@pytest.mark.parametrize("steps", [[1, 2], [1, 2, 2, 3], [1, 3]])
def test_missing_or_repeated_steps_are_refused(plan: Plan, tmp_path: Path, steps: list[int]) -> None:
    with pytest.raises(StageError, match="each of the 3 steps once"):
        check_result({"updates": 3}, _metrics(tmp_path / "m.jsonl", steps), plan)


@pytest.mark.parametrize(("name", "value"), [("loss", float("nan")), ("reward", float("inf"))])
def test_a_figure_that_is_not_finite_is_refused_by_name(plan: Plan, tmp_path: Path, name: str, value: float) -> None:
    with pytest.raises(StageError, match=f"step 1: {name} is"):
        check_result({"updates": 3}, _metrics(tmp_path / "m.jsonl", [1, 2, 3], **{name: value}), plan)
