"""A training says which phase it is in."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_core.system import progress
from grpo_core.training.loop import train
from tests.conftest import config_values, make_run


def test_a_training_says_each_phase_of_its_work_by_name(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {"beta": 0.1, "num_iterations": 2, "eval_steps": 2, "save_steps": 1, "hang_timeout": 77.0}
    run = make_run(tmp_path / "run", config_values(model_folder, tmp_path, **keys))
    monkeypatch.setattr(progress, "_here", None)
    progress.start(run / "training" / progress.RANKS)
    seen: dict[str, float] = {}

    def record(here: progress._Progress) -> None:
        seen[here.phase] = here.limit()

    monkeypatch.setattr(progress._Progress, "write", record)
    train(run, run / "training")
    progress.faulthandler.unregister(progress.DUMP_SIGNAL)
    steady = {"loop", "weight sync", "sampling", "old log-probabilities", "reference log-probabilities", "update"}
    assert {name: seen[name] for name in steady} == dict.fromkeys(steady, 77.0)
    assert seen["sampling/rewards"] == seen["evaluation/sampling/rewards"] == 2 * 2 * 300
    assert seen.keys() - steady == {
        "set-up",
        "checkpoint",
        "evaluation",
        "evaluation/sampling",
        "evaluation/sampling/rewards",
        "evaluation/weight sync",
        "sampling/rewards",
        "saving the model",
    }
