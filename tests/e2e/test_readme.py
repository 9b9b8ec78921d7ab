"""README's own run, command by command as a newcomer copies it: a reward of one's own, from data to a champion."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import EXAMPLE
from tests.readme import write_own_run

GRPO = Path(sys.executable).with_name("grpo")
SECONDS = 900

pytestmark = pytest.mark.e2e


def test_readme_s_own_run_ends_with_a_champion(tmp_path: Path) -> None:
    _do(tmp_path, sys.executable, str(EXAMPLE))
    for command in write_own_run(tmp_path, num_prompts=400, held_out=200):
        if command != ["up"]:
            _do(tmp_path, str(GRPO), *command)
    runs = tmp_path / "storage" / "runs"
    for name in ("mine", "faster"):
        report = json.loads((runs / name / "evaluation" / "report.json").read_text())
        assert report["deciding_metric"] == "reward"
        assert report["sets"]["held-out"]["differences"]["base"]["reward"]["low"] > 0
        assert (runs / name / "rewards" / "my_rewards.py").read_text() == (tmp_path / "my_rewards.py").read_text()
    said = _do(tmp_path, str(GRPO), "promote", "mine")
    assert "mine version 1: unchanged: version 1 is the champion already" in " ".join(said.split())
    assert not (tmp_path / "mlflow.db").exists()
    (tmp_path / "my_rewards.py").unlink()
    _do(tmp_path, str(GRPO), "status", "mine")  # up to date by the copy that the run keeps


def _do(folder: Path, *command: str) -> str:
    left_out = ("PREFECT_", "MLFLOW_", "PYTHONPATH", "GRPO_")
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(left_out)}
    done = subprocess.run(
        command,
        cwd=folder,
        env=inherited,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout
