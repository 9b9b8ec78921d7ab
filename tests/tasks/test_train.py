"""A training is used only when it did what the plan says, with finite figures, though its process exited 0."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from grpo_core.config.training import TrainConfig
from grpo_core.planning.plan import Plan, make_plan
from grpo_core.planning.rules import PlanInputs
from tasks.stages.errors import StageError
from tasks.train import check_result, launcher, process_environment


@pytest.fixture
def plan() -> Plan:
    return make_plan(PlanInputs(8, 4, 8, max_completion_length=4, max_steps=3))


def _metrics(path: Path, steps: list[int], **figures: float) -> Path:
    path.write_text("".join(json.dumps({"step": step, "loss": 0.1, "reward": 0.5, **figures}) + "\n" for step in steps))
    return path


COUNTED = {"updates": 3, "rollouts": 3, "prompts_seen": 6, "prompts_dropped": 0, "completions": 24}


def _result(stopped_early_at_step: int | None = None, **counted: int) -> dict[str, Any]:
    return {
        "counted": {**COUNTED, **counted},
        "stopped_early_at_step": stopped_early_at_step,
        "steps_without_metrics": [],
    }


def test_a_training_that_followed_its_plan_is_accepted(plan: Plan, tmp_path: Path) -> None:
    check_result(_result(), _metrics(tmp_path / "m.jsonl", [1, 2, 3]), plan)


def test_a_training_that_stopped_early_is_held_against_the_plan_up_to_there(plan: Plan, tmp_path: Path) -> None:
    counted = {"updates": 2, "rollouts": 2, "prompts_seen": 4, "completions": 16}
    check_result(_result(2, **counted), _metrics(tmp_path / "m.jsonl", [1, 2]), plan)
    with pytest.raises(StageError, match="the plan says"):
        check_result(_result(None, **counted), _metrics(tmp_path / "m.jsonl", [1, 2]), plan)
    with pytest.raises(StageError, match="each of the 2 steps once"):
        check_result(_result(2, **counted), _metrics(tmp_path / "m.jsonl", [1, 2, 3]), plan)


@pytest.mark.parametrize(
    ("name", "value"),
    [("updates", 2), ("updates", 4), ("rollouts", 4), ("prompts_seen", 5), ("prompts_dropped", 1), ("completions", 32)],
)
def test_a_count_that_is_not_the_planned_one_is_refused(plan: Plan, tmp_path: Path, name: str, value: int) -> None:
    with pytest.raises(StageError, match=f"plan says .*'{name}': {COUNTED[name]}.* counted .*'{name}': {value}"):
        check_result(_result(**{name: value}), _metrics(tmp_path / "m.jsonl", [1, 2, 3]), plan)


@pytest.mark.parametrize("steps", [[1, 2], [1, 2, 2, 3], [1, 3]])
def test_missing_or_repeated_steps_are_refused(plan: Plan, tmp_path: Path, steps: list[int]) -> None:
    with pytest.raises(StageError, match="each of the 3 steps once"):
        check_result(_result(), _metrics(tmp_path / "m.jsonl", steps), plan)


@pytest.mark.parametrize(("name", "value"), [("loss", float("nan")), ("reward", float("inf"))])
def test_a_figure_that_is_not_finite_is_refused_by_name(plan: Plan, tmp_path: Path, name: str, value: float) -> None:
    with pytest.raises(StageError, match=f"step 1: {name} is"):
        check_result(_result(), _metrics(tmp_path / "m.jsonl", [1, 2, 3], **{name: value}), plan)


def test_one_process_is_started_without_a_launcher_with_the_environment_that_it_would_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    train = TrainConfig()
    assert launcher(train) == []
    threads = str(os.cpu_count())
    assert process_environment(train) == {"ACCELERATE_MIXED_PRECISION": "no", "OMP_NUM_THREADS": threads}
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert process_environment(train)["OMP_NUM_THREADS"] == "3"


def test_several_processes_are_started_by_accelerate() -> None:
    command = launcher(TrainConfig(num_processes=2))
    assert "accelerate.commands.launch" in command
    assert command[command.index("--num_processes") + 1] == "2"
    assert command[command.index("--mixed_precision") + 1] == "no"  # the policy has its own copy in bfloat16
