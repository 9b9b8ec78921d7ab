"""Which Python trains, and what a run is refused for if that one cannot."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from grpo_core.config.files import parse_config
from grpo_core.config.run import RunConfig
from tasks.processes import machine
from tasks.processes.gpus.check import MachineError
from tasks.processes.launchers.batch import command
from tasks.processes.launchers.ssh import remote_command
from tasks.processes.run import PYTHON, run_process, training_python
from tasks.processes.training_machine import check_training_machine, training_packages, training_version
from tests.conftest import config_values

ROOT = Path(__file__).parents[3]


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return parse_config(config_values(tmp_path, tmp_path))


def _other_python(file: Path, setting: str = "THERE=1") -> str:
    """A Python that has another path and one more environment variable."""
    file.write_text(f'#!/bin/sh\n{setting} exec {sys.executable} "$@"\n')
    file.chmod(0o755)
    return str(file)


@pytest.mark.slow
def test_processes_of_a_training_run_by_the_python_that_is_named(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = _other_python(tmp_path / "python")
    monkeypatch.setenv(PYTHON, python)
    lines: list[str] = []
    run_process(["-c", "import os; print(os.environ.get('THERE'))"], lines.append)
    assert lines == ["1"] and training_python() == python
    assert python in remote_command("alpha", "run")[-1] and python in command(tmp_path)
    check_training_machine(config)
    assert training_packages(["torch", "python", "none"]) == {
        name: version for name, version in machine.package_versions().items() if name in ("torch", "python")
    }
    assert training_version() == machine.code_version()


def test_without_a_name_this_python_trains(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PYTHON, raising=False)
    assert training_python() == sys.executable
    check_training_machine(config)


def test_a_python_without_this_project_is_refused_with_the_reason(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = _other_python(tmp_path / "bare")
    Path(bare).write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    for python, reason in (
        (bare, "No module named 'tasks'"),
        ("/none/python", "No such file"),
        ("/bin/true", "it answers ''"),
    ):
        monkeypatch.setenv(PYTHON, python)
        with pytest.raises(MachineError, match=rf"^GRPO_PYTHON={re.escape(python)} is not .*{reason}.*--no-deps -e \."):
            check_training_machine(config)


@pytest.mark.slow
def test_a_python_with_other_code_is_refused_wherever_it_is_asked_from(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("grpo_core", "tasks"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    python = _other_python(tmp_path / "python", f"PYTHONPATH={shlex.quote(str(tmp_path))}")
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv(PYTHON, python)
    check_training_machine(config)
    with (tmp_path / "tasks" / "train.py").open("a") as file:
        file.write("# changed\n")
    with pytest.raises(MachineError, match=r"/python has other code of this project than "):
        check_training_machine(config)


@pytest.mark.parametrize(
    ("engine", "on_gpu", "said"),
    [
        ("vllm", False, "rollout.engine='vllm' needs vLLM, which "),
        ("vllm-server", False, "rollout.engine='vllm-server' needs"),
        ("auto", True, r"rollout.engine='vllm' \(what 'auto' means on a GPU\) needs"),
        ("auto", False, None),
        ("transformers", True, None),
    ],
)
def test_an_engine_that_is_not_installed_is_refused_before_anything_starts(
    engine: str, on_gpu: bool, said: str | None, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = {name: version for name, version in machine.package_versions().items() if "vllm" not in name}
    monkeypatch.setattr(machine, "package_versions", lambda: packages)
    monkeypatch.setattr(machine, "check_gpu_machine", lambda: on_gpu)
    config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"engine": engine})})
    if said is None:
        check_training_machine(config)
    else:
        with pytest.raises(MachineError, match=said):
            check_training_machine(config)
