"""A machine without a GPU is told from one whose driver does not answer, and CUDA's rules say which GPUs are seen."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import psutil
import pytest

from grpo_core.config.files import parse_config
from grpo_core.planning import hardware, nvidia
from grpo_core.planning.hardware import Gpu, find_gpu, name_hardware
from grpo_core.planning.nvidia import DriverError, list_devices, problem_of_driver, used_memory, visible_devices
from grpo_core.system.memory import GIB
from tests.conftest import config_values
from tests.nvidia_smi import LOST, put_nvidia_smi

A100 = {"name": "NVIDIA A100-SXM4-80GB", "memory.total": "81920", "compute_cap": "8.0"}
DIVIDED = A100 | {"mig.mode.current": "Enabled"}
SLICES = {"slices": [["1g.10gb", "MIG-c6d4f1ef"], ["3g.40gb", "MIG-cba663e8"]]}


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH for nvidia-smi, and beside it an empty /dev."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / "dev").mkdir()
    monkeypatch.setattr(nvidia, "DEVICES", tmp_path / "dev")
    return tmp_path


def _driver(machine: Path) -> None:
    (machine / "dev" / "nvidia0").touch()
    (machine / "dev" / "nvidiactl").touch()


def _entries() -> list[str]:
    return [device.entry for device in visible_devices()]


@pytest.mark.parametrize("says", [None, "NVIDIA-SMI has failed because it couldn't communicate with the driver.\n"])
def test_a_machine_without_a_gpu_is_one_whether_or_not_it_has_nvidia_smi(machine: Path, says: str | None) -> None:
    if says:
        put_nvidia_smi(machine, 0, first=says, status=9)
    assert visible_devices() == [] and problem_of_driver() == "" and find_gpu() is None
    assert name_hardware(None).startswith("CPU with")


def test_a_job_that_was_given_no_gpu_of_its_machine_has_none(machine: Path) -> None:
    """As in Slurm: the device's file is there, and may not be opened."""
    _driver(machine)
    put_nvidia_smi(machine, 0, first="No devices were found\n", status=6)
    assert visible_devices() == []


def test_a_driver_that_does_not_know_all_that_is_asked_is_asked_for_less(machine: Path) -> None:
    _driver(machine)
    put_nvidia_smi(
        machine, [{"name": "Tesla K80", "driver_version": "470.1", "compute_cap": None, "mig.mode.current": None}]
    )
    [device] = visible_devices()
    assert (device.name, device.driver, device.capability, device.memory_mib) == ("Tesla K80", "470.1", None, 81559)


@pytest.mark.parametrize(
    ("first", "status", "seconds", "said"),
    [
        (None, 0, 0.0, r"no nvidia-smi on PATH.* install it, or .*NVIDIA_DRIVER_CAPABILITIES=compute,utility"),
        (
            "Failed to initialize NVML: Driver/library version mismatch\n",
            18,
            0.0,
            r"lists none: status 18, Failed to i",
        ),
        (LOST, 15, 0.0, r"lists none: status 15, Unable to determine the device handle"),
        ("", 0, 60.0, r"not answered within 0\.1 s: .*persistence mode"),
    ],
    ids=["missing", "mismatch", "lost", "slow"],
)
def test_a_driver_that_does_not_answer_is_not_a_machine_without_a_gpu(
    first: str | None, status: int, seconds: float, said: str, machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _driver(machine)
    monkeypatch.setattr(nvidia, "LIMIT_SECONDS", 0.1 if seconds else 60.0)
    if first is not None:
        put_nvidia_smi(machine, 0, first=first, status=status, seconds=seconds)
    for ask in (visible_devices, find_gpu):
        with pytest.raises(DriverError, match=said):
            ask()
    for hidden in ("", "-1", "none"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)  # the way out that the sentence names
        assert visible_devices() == [] and find_gpu() is None


def test_gpus_that_are_listed_before_nvidia_smi_fails_are_used_and_the_failure_is_said(machine: Path) -> None:
    _driver(machine)
    put_nvidia_smi(machine, 7, first=LOST, status=15)
    assert _entries() == list("0123456")
    gpu = find_gpu()
    assert gpu is not None and gpu.per_machine == 7
    assert problem_of_driver() == f"nvidia-smi lists 7 GPUs, and then fails: status 15, {LOST.strip()}"


def test_a_process_asks_once_whichever_gpus_it_is_shown(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = put_nvidia_smi(machine, 2)
    assert (_entries(), problem_of_driver()) == (["0", "1"], "")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    gpu = find_gpu()
    assert gpu is not None and gpu.per_machine == 1
    assert len(asked.read_text().splitlines()) == 1


def _entries_by_variable(monkeypatch: pytest.MonkeyPatch, cases: Iterable[str | None]) -> dict[str | None, list[str]]:
    found = {}
    for given in cases:
        with monkeypatch.context() as patch:
            if given is not None:
                patch.setenv("CUDA_VISIBLE_DEVICES", given)
            found[given] = _entries()
    return found


def test_visible_are_the_gpus_that_cuda_would_show(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_nvidia_smi(machine, 4)
    expected = {
        None: ["0", "1", "2", "3"],
        "2,1": ["2", "1"],
        "0,9,1": ["0"],
        "0,-1,1": ["0"],
        "0, 3": ["0", "3"],
        "1,1": [],  # as torch reads it
        "GPU-3a,GPU-0a6e": ["GPU-3a6e", "GPU-0a6e"],  # written out: vLLM takes whole UUIDs only
        "GPU-3a,GPU-7,GPU-0a": ["GPU-3a6e"],
        "GPU-,GPU-0a": [],  # several begin so
        "GPU-3a,1": ["GPU-3a6e"],  # an entry of another kind
        "1,GPU-3a": ["1"],
        "MIG-1": [],
        "": [],
        "-1": [],
    }
    assert _entries_by_variable(monkeypatch, expected) == expected


def test_a_gpu_that_is_divided_is_its_slices(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_nvidia_smi(machine, [DIVIDED | SLICES, A100])
    expected = {
        None: ["MIG-c6d4f1ef", "MIG-cba663e8", "1"],
        "MIG-cba663e8": ["MIG-cba663e8"],
        "MIG-c,MIG-0": [],
        "1": ["1"],
        "0": ["MIG-c6d4f1ef"],  # a number stands for the first slice, which so has one name, and one lock
    }
    assert _entries_by_variable(monkeypatch, expected) == expected


def test_the_gpu_of_a_plan_is_the_smallest_visible_one_and_other_kinds_are_named(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = {"name": "NVIDIA GeForce RTX 2080 Ti", "memory.total": "11264", "compute_cap": "7.5"}
    put_nvidia_smi(machine, [{}, old, {}])
    found = find_gpu()
    assert found is not None and found.host_gib == pytest.approx(psutil.virtual_memory().total / GIB)
    among = "2 × NVIDIA H100 80GB HBM3, 1 × NVIDIA GeForce RTX 2080 Ti"
    assert found == Gpu("NVIDIA GeForce RTX 2080 Ti", 11.0, among, 3, found.host_gib, (7, 5))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2")
    found = find_gpu()
    assert found == Gpu("NVIDIA H100 80GB HBM3", 81559 / 1024, "", 2, found and found.host_gib, (9, 0))


@pytest.mark.parametrize(
    ("name", "capability", "precision"),
    [
        ("NVIDIA GeForce RTX 2080 Ti", "7.5", "no"),
        ("Quadro P6000", "6.1", "no"),
        ("NVIDIA L4", "8.9", "bf16"),
        ("NVIDIA GB10", "[N/A]", "bf16"),
    ],
)
def test_a_plan_has_the_precision_that_the_training_will_take(
    name: str, capability: str, precision: str, machine: Path
) -> None:
    """By the compute capability: there are too many older GPUs to name them."""
    put_nvidia_smi(machine, [{"name": name, "compute_cap": capability}])
    config = parse_config(config_values(machine, machine, mixed_precision="auto"))
    assert config.with_precision(hardware.capability(find_gpu())).train.mixed_precision == precision


@pytest.mark.parametrize(("name", "precision"), [("T4", "no"), ("H200", "bf16"), ("", "no")])
def test_a_gpu_that_is_only_named_has_its_name_s_precision(name: str, precision: str, tmp_path: Path) -> None:
    config = parse_config(config_values(tmp_path, tmp_path, mixed_precision="auto"))
    gpu = hardware.named_gpu(name) if name else None
    assert config.with_precision(hardware.capability(gpu)).train.mixed_precision == precision


def test_a_slice_has_not_the_memory_of_its_gpu_and_a_gpu_without_slices_is_none(machine: Path) -> None:
    put_nvidia_smi(machine, [DIVIDED | SLICES, DIVIDED])
    assert _entries() == ["MIG-c6d4f1ef", "MIG-cba663e8"]
    gpu = find_gpu()
    assert gpu is not None
    assert (gpu.name, gpu.memory_gib) == ("MIG 1g.10gb of one NVIDIA A100-SXM4-80GB", None)
    assert (gpu.per_machine, gpu.capability) == (1, (8, 0)), "a process sees one slice"


def test_values_that_nvidia_smi_does_not_know_are_not_known(machine: Path) -> None:
    unknown = dict.fromkeys(("memory.total", "memory.used", "compute_cap", "mig.mode.current"), "[N/A]")
    put_nvidia_smi(machine, [unknown | {"name": "NVIDIA GB10, with a comma"}])
    [device] = list_devices().devices
    assert (device.name, device.memory_mib, device.capability) == ("NVIDIA GB10, with a comma", None, None)
    assert used_memory() == {}
    gpu = find_gpu()
    assert gpu == Gpu("NVIDIA GB10, with a comma", per_machine=1, host_gib=gpu and gpu.host_gib)


def test_memory_in_use_is_asked_anew(machine: Path) -> None:
    put_nvidia_smi(machine, [{}, {"memory.used": "70000"}])
    assert used_memory() == {"GPU-0a6e": 4, "GPU-1a6e": 70000}
    put_nvidia_smi(machine, 2)
    assert used_memory()["GPU-1a6e"] == 4
