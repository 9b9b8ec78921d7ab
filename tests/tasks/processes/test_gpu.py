"""A GPU machine that would train on its CPU, or fail in the first compilation, is refused by one sentence."""

from __future__ import annotations

import re
import sysconfig
from pathlib import Path

import pytest

from flows.parameters.early_refusals import refuse_early
from grpo_core.config.files import parse_config
from grpo_core.planning import nvidia
from grpo_core.planning.nvidia import DriverError
from tasks.processes.gpus import check as gpu
from tasks.processes.gpus.check import MachineError, check_gpu_machine
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
    _command(tmp_path / "gcc", "exit 0")
    return tmp_path


def _command(path: Path, line: str) -> None:
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)


def test_a_machine_with_all_that_is_needed_passes(machine: Path) -> None:
    check_gpu_machine()


@pytest.mark.parametrize(
    ("cuda", "driver", "oldest"), [(13, "575.57.08", 580), (13, "535.104.05", 580), (12, "470.1", 525)]
)
def test_a_driver_that_is_too_old_for_the_installed_pytorch_is_named(
    cuda: int, driver: str, oldest: int, machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_nvidia_smi(machine, [{"driver_version": driver}])
    monkeypatch.setattr(gpu, "_cuda_of_torch", lambda: cuda)
    with pytest.raises(MachineError, match=rf"driver is {driver}, .* CUDA {cuda}, needs {oldest} or newer"):
        check_gpu_machine()


def test_a_driver_that_pytorch_finds_a_gpu_with_is_new_enough_whatever_its_number(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with CUDA's compatibility package."""
    put_nvidia_smi(machine, [{"driver_version": "535.104.05"}])
    monkeypatch.setattr(gpu, "_torch_finds_gpu", lambda: True)
    check_gpu_machine()


@pytest.mark.parametrize("finds", [True, False])
def test_pytorch_is_asked_in_a_process_of_its_own(finds: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text(f"class cuda:\n    is_available = lambda: {finds}\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert gpu._torch_finds_gpu() is finds


@pytest.mark.parametrize(("cuda", "driver"), [(12, "535.104.05"), (13, "580.65.06"), (13, "610.1"), (14, "500.1")])
def test_a_driver_that_is_new_enough_or_for_a_cuda_that_is_not_known_passes(
    cuda: int, driver: str, machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_nvidia_smi(machine, [{"driver_version": driver}])
    monkeypatch.setattr(gpu, "_cuda_of_torch", lambda: cuda)
    check_gpu_machine()


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
    (machine / "gcc").unlink()
    if missing == "no GPU":
        (machine / "nvidia-smi").unlink()
    elif missing == "no driver":
        put_nvidia_smi(machine, 0, first="NVIDIA-SMI has failed\n", status=9)
    elif missing == "hidden":
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    else:
        monkeypatch.setattr(gpu, "_cuda_of_torch", lambda: None)
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
