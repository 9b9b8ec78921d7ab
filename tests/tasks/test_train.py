"""A training is used only when it did what the plan says, with finite figures, though its process exited 0."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from grpo_core.config.files import parse_config
from grpo_core.planning.plan import Plan, make_plan
from grpo_core.planning.rules import PlanInputs
from tasks.processes import launch as launching
from tasks.processes.launch import RETURN_SECONDS
from tasks.processes.run import ProcessError, TakenError
from tasks.processes.training import check_result, run_training
from tasks.stages.errors import StageError
from tasks.stages.run import Context
from tests.conftest import config_values


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


COUNTS = [("updates", 2), ("updates", 4), ("rollouts", 4), ("prompts_seen", 5), ("prompts_dropped", 1)]


@pytest.mark.parametrize(
    ("counted", "steps", "figures", "said"),
    [
        *(
            ({name: value}, [1, 2, 3], {}, f"plan says .*'{name}': {COUNTED[name]}.* counted .*'{name}': {value}")
            for name, value in (*COUNTS, ("completions", 32))
        ),
        *(({}, steps, {}, "each of the 3 steps once") for steps in ([1, 2], [1, 2, 2, 3], [1, 3])),
        ({}, [1, 2, 3], {"loss": float("nan")}, "step 1: loss is"),
        ({}, [1, 2, 3], {"reward": float("inf")}, "step 1: reward is"),
    ],
)
def test_other_counts_than_planned_other_steps_and_figures_that_are_not_finite_are_refused(
    plan: Plan, tmp_path: Path, counted: dict[str, int], steps: list[int], figures: dict[str, float], said: str
) -> None:
    with pytest.raises(StageError, match=said):
        check_result(_result(**counted), _metrics(tmp_path / "m.jsonl", steps, **figures), plan)


class Launches:
    """Stands for `launch`: fails as it is told to, one start after another, and then succeeds."""

    def __init__(self, *restartable: bool):
        self.failures, self.patience = list(restartable), list[float]()

    def __call__(self, *arguments: Any) -> None:
        self.patience.append(arguments[-1])
        if self.failures:
            raise ProcessError("machine beta ended with status 137 (SIGKILL)", self.failures.pop(0))


def _train(tmp_path: Path, max_restarts: int) -> None:
    config = parse_config(config_values(Path("model"), Path("data"), max_restarts=max_restarts))
    run_training(Context(config, tmp_path, tmp_path), print, {}, logging.getLogger("stage"))


def test_a_killed_training_is_started_again_as_often_as_allowed_and_waits_for_its_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(launching, "launch", launches := Launches(True, True))
    _train(tmp_path, max_restarts=2)
    assert launches.patience == [0, RETURN_SECONDS, RETURN_SECONDS]
    beginnings = [record.message.partition(":")[0] for record in caplog.records]
    assert beginnings == ["restart 1 of 2 (train.max_restarts)", "restart 2 of 2 (train.max_restarts)"]
    assert all("machine beta ended with status 137" in record.message for record in caplog.records)
    monkeypatch.setattr(launching, "launch", launches := Launches(True, True))
    with pytest.raises(ProcessError, match="beta"):
        _train(tmp_path, max_restarts=1)


def test_machines_that_are_taken_away_count_as_no_restart_as_long_as_each_start_saves_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = [3, 7, 7]

    def taken(*arguments: Any) -> None:
        (tmp_path / "checkpoints" / f"step-{steps.pop(0):06d}").mkdir(parents=True, exist_ok=True)
        raise TakenError("Slurm ended job 7 (PREEMPTED)", restartable=True)

    monkeypatch.setattr(launching, "launch", taken)
    with pytest.raises(TakenError):
        _train(tmp_path, max_restarts=0)
    assert not steps
    steps[:] = [9, 9, 9, 9]
    with pytest.raises(TakenError):
        _train(tmp_path, max_restarts=2)
    assert not steps


def test_a_training_that_was_killed_when_it_had_written_everything_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "result.json").write_text('{"counted": {}}')
    monkeypatch.setattr(launching, "launch", launches := Launches(True))
    _train(tmp_path, max_restarts=0)
    assert len(launches.patience) == 1


def test_a_training_that_fails_by_itself_is_not_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "launch", launches := Launches(False))
    with pytest.raises(ProcessError):
        _train(tmp_path, max_restarts=3)
    assert len(launches.patience) == 1
