"""The first run, and the page of environments, command by command as a newcomer copies them."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests.conftest import EXAMPLE
from tests.e2e.commands import run
from tests.readme import ENVIRONMENTS, FIRST_RUN, commands_of, write_files

PROGRAMS = {"python": sys.executable, "grpo": str(Path(sys.executable).with_name("grpo"))}

pytestmark = pytest.mark.e2e


def test_the_first_run_ends_with_a_champion(tmp_path: Path) -> None:
    _do(tmp_path, "python", str(EXAMPLE))
    write_files(FIRST_RUN, tmp_path)
    said = ""
    for program, *arguments in commands_of(FIRST_RUN):
        if program != "export":
            said = _do(tmp_path, program, *arguments)
    assert "mine version 1: promoted: reward on held-out" in " ".join(said.split())
    runs = tmp_path / "storage" / "runs"
    for name in ("mine", "faster"):
        report = json.loads((runs / name / "evaluation" / "report.json").read_text())
        assert report["deciding_metric"] == "reward"
        assert report["sets"]["held-out"]["differences"]["base"]["reward"]["low"] > 0
        assert (runs / name / "rewards" / "my_rewards.py").read_text() == (tmp_path / "my_rewards.py").read_text()
    again = _do(tmp_path, "grpo", "promote", "mine")
    assert "mine version 1: unchanged: version 1 is the champion already" in " ".join(again.split())
    assert not (tmp_path / "mlflow.db").exists()
    (tmp_path / "my_rewards.py").unlink()
    _do(tmp_path, "grpo", "status", "mine")  # up to date by the copy that the run keeps


def test_the_page_of_environments_ends_with_a_policy_that_uses_its_tool(tmp_path: Path) -> None:
    _, init, (_, name), make, *rest = commands_of(ENVIRONMENTS)
    _do(tmp_path, *init)
    folder = tmp_path / name
    write_files(ENVIRONMENTS, folder)
    for program, *arguments in (make, *rest):
        _do(folder, program, *arguments)
    report = json.loads((folder / "storage" / "runs" / "mine" / "evaluation" / "report.json").read_text())
    assert report["sets"]["held-out"]["differences"]["base"]["reward"]["low"] > 0


def _do(folder: Path, program: str, *arguments: str) -> str:
    left_out = ("PREFECT_", "MLFLOW_", "PYTHONPATH", "PYTHONSAFEPATH", "GRPO_")
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(left_out)}
    return run([PROGRAMS[program], *arguments], folder, inherited)
