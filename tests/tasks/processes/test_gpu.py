"""A GPU machine that would train on its CPU, or fail in the first compilation, and a Python that cannot train are
refused by one sentence."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
import sysconfig
from contextlib import nullcontext
from pathlib import Path

import pytest

from flows.parameters.early_refusals import refuse_early
from grpo_core.config.files import parse_config
from grpo_core.config.run import RunConfig
from grpo_core.planning import nvidia
from grpo_core.planning.nvidia import DriverError
from tasks.processes import machine as module
from tasks.processes.gpus import check as gpu
from tasks.processes.gpus.check import MachineError, check_gpu_machine
from tasks.processes.launchers.batch import command
from tasks.processes.launchers.ssh import remote_command
from tasks.processes.run import PYTHON, run_process, training_python
from tasks.processes.training_machine import check_training_machine, training_packages, training_version
from tasks.stages.table import GPU_DEPLOYMENT
from tests.conftest import config_values
from tests.nvidia_smi import put_nvidia_smi


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH with a driver of version 580.65.06, a C compiler, and a PyTorch for CUDA 13, which finds no GPU where the
    driver is too old."""
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("CC", "CUDA_VISIBLE_DEVICES", GPU_DEPLOYMENT):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(gpu, "_cuda_of_torch", lambda: 13)
    monkeypatch.setattr(gpu, "_torch_finds_gpu", lambda: False)
    monkeypatch.setattr(nvidia, "DEVICES", tmp_path / "dev")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / name))
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "Python.h").touch()
    put_nvidia_smi(tmp_path, 2)
    return tmp_path


def _command(path: Path, line: str) -> None:
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)


def test_a_machine_with_all_that_is_needed_passes(machine: Path) -> None:
    check_gpu_machine()


@pytest.mark.parametrize(
    ("cuda", "driver", "finds", "oldest"),
    [
        (13, "575.57.08", False, 580),
        (13, "535.104.05", False, 580),
        (12, "470.1", False, 525),
        (13, "535.104.05", True, None),  # with CUDA's compatibility package
        (12, "535.104.05", False, None),
        (13, "580.65.06", False, None),
        (13, "610.1", False, None),
        (14, "500.1", False, None),  # not known
    ],
)
def test_a_driver_that_is_too_old_for_the_installed_pytorch_is_named_unless_that_finds_a_gpu_with_it(
    cuda: int, driver: str, finds: bool, oldest: int | None, machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_nvidia_smi(machine, [{"driver_version": driver}])
    monkeypatch.setattr(gpu, "_cuda_of_torch", lambda: cuda)
    monkeypatch.setattr(gpu, "_torch_finds_gpu", lambda: finds)
    said = rf"driver is {driver}, .* CUDA {cuda}, needs {oldest} or newer"
    with pytest.raises(MachineError, match=said) if oldest else nullcontext():
        check_gpu_machine()


@pytest.mark.parametrize("finds", [True, False])
def test_pytorch_is_asked_in_a_process_of_its_own(finds: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text(f"class cuda:\n    is_available = lambda: {finds}\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert gpu._torch_finds_gpu() is finds


def test_a_c_compiler_and_python_s_headers_are_asked_for(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (machine / "gcc").rename(machine / "clang")
    check_gpu_machine()
    (machine / "clang").unlink()
    with pytest.raises(MachineError, match=r"no C compiler is found, .*Triton.* install gcc"):
        check_gpu_machine()
    monkeypatch.setenv("CC", "icx")
    check_gpu_machine()
    (machine / "include" / "Python.h").unlink()
    with pytest.raises(MachineError, match=f"headers are not in {re.escape(str(machine / 'include'))}, .*python3-dev"):
        check_gpu_machine()


@pytest.mark.parametrize("missing", ["no GPU", "no driver", "hidden", "PyTorch for CPUs"])
def test_a_machine_that_uses_no_gpu_is_not_asked_for_more(
    missing: str, machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if missing == "no GPU":
        (machine / "nvidia-smi").unlink()
    elif missing == "no driver":
        put_nvidia_smi(machine, 0, first="NVIDIA-SMI has failed\n", status=9)
    elif missing == "hidden":
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    else:
        monkeypatch.setattr(gpu, "_cuda_of_torch", lambda: None)
    (machine / "gcc").unlink()
    check_gpu_machine()


def test_a_driver_that_does_not_answer_is_refused_before_anything_starts(machine: Path) -> None:
    (machine / "dev").mkdir()
    (machine / "dev" / "nvidia0").touch()
    put_nvidia_smi(machine, 0, first="Failed to initialize NVML: Unknown Error\n", status=255)
    with pytest.raises(DriverError, match="Failed to initialize NVML"):
        check_gpu_machine()


@pytest.mark.parametrize(
    ("version", "major"), [("cuda: Optional[str] = '13.0'", 13), ("cuda: Optional[str] = None", None)]
)
def test_the_cuda_of_pytorch_is_read_without_importing_it(
    version: str, major: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "__init__.py").touch()
    (tmp_path / "version.py").write_text(f"debug = False\n{version}\nhip: Optional[str] = '7.1'\n")
    monkeypatch.setattr(gpu, "find_spec", lambda name: type("Spec", (), {"origin": str(tmp_path / "__init__.py")}))
    assert gpu._cuda_of_torch() == major


def test_a_run_on_such_a_machine_is_refused_early_unless_it_trains_on_another(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (machine / "gcc").unlink()
    values = config_values(machine, machine)
    values["data"] = {"train": "someone/prompts", "eval": "someone/others"}
    with pytest.raises(MachineError) as refused:
        refuse_early(parse_config(values))
    assert refused.value.exit_status == 2
    monkeypatch.setenv(GPU_DEPLOYMENT, "gpu")
    refuse_early(parse_config(values))


ROOT = Path(__file__).parents[3]


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return parse_config(config_values(tmp_path, tmp_path))


def _other_python(file: Path, setting: str = "THERE=1") -> str:
    """A Python that has another path and one more environment variable."""
    _command(file, f'{setting} exec {shlex.quote(sys.executable)} "$@"')
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
        name: version for name, version in module.package_versions().items() if name in ("torch", "python")
    }
    assert training_version() == module.code_version()


def test_without_a_name_this_python_trains(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PYTHON, raising=False)
    assert training_python() == sys.executable
    check_training_machine(config)


def test_a_python_without_this_project_is_refused_with_the_reason(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _command(tmp_path / "bare", f'exec {shlex.quote(sys.executable)} -I -S "$@"')
    for python, reason in (
        (str(tmp_path / "bare"), "No module named 'tasks'"),
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
    packages = {name: version for name, version in module.package_versions().items() if "vllm" not in name}
    monkeypatch.setattr(module, "package_versions", lambda: packages)
    monkeypatch.setattr(module, "check_gpu_machine", lambda: on_gpu)
    config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"engine": engine})})
    if said is None:
        check_training_machine(config)
    else:
        with pytest.raises(MachineError, match=said):
            check_training_machine(config)
