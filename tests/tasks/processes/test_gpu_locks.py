"""Stages on one machine use different GPUs, whichever they may see and however they end."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_core.config.files import dump_config, parse_config
from grpo_core.planning import nvidia
from grpo_core.planning.nvidia import DriverError
from tasks.processes.gpus import locks as gpu_locks
from tasks.processes.gpus.locks import one_free_gpu, own_gpus, take_gpus
from tasks.processes.machine import gpus_needed
from tasks.processes.run import run_process
from tasks.stages.errors import StageError
from tests.conftest import config_values, with_keys
from tests.nvidia_smi import LOST, put_nvidia_smi

pytestmark = pytest.mark.served

COUNT = 8


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with eight GPUs; the folder of its locks."""
    put_nvidia_smi(tmp_path, COUNT)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(gpu_locks, "LOCKS", tmp_path / "locks")
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "locks"


class Refused(Exception):
    pass


def refuse() -> None:
    raise Refused


def refused(text: str) -> None:
    raise Refused(text)


def free(count: int) -> dict[str, int]:
    """What a stage would get now; Refused if it would have to wait."""
    return take_gpus(count, lambda text: None, refuse)


def test_two_stages_of_four_share_a_machine_of_eight_and_the_third_waits() -> None:
    first, second = free(4), free(4)
    assert [*first, *second] == [str(number) for number in range(COUNT)]
    said: list[str] = []
    with pytest.raises(Refused):
        take_gpus(1, said.append, refuse)
    assert said == [f"waiting for 1 GPUs of this machine: 0 of 8 are free (locks in {gpu_locks.LOCKS})"]
    os.close(first["2"])
    assert [*free(1)] == ["2"]


@pytest.mark.parametrize("name", ["", "0", "choosing"])
def test_a_link_that_another_user_put_in_place_of_a_lock_is_refused_and_not_followed(machine: Path, name: str) -> None:
    private = machine.parent / "private"
    private.mkdir(0o700)
    if name:
        machine.mkdir()
    (machine / name).symlink_to(private)
    with pytest.raises(
        StageError, match=rf"{re.escape(str(machine / name))} cannot be locked \(Not a directory\).* remove it"
    ):
        free(1)
    assert private.stat().st_mode & 0o7777 == 0o700 and not any(private.iterdir())


def test_locks_that_another_user_made_are_shared_as_they_are(machine: Path) -> None:
    (machine / "0").mkdir(parents=True, mode=0o750)
    machine.chmod(0o777)
    assert [*free(2)] == ["0", "1"]
    modes = {path: path.stat().st_mode & 0o7777 for path in (machine, machine / "0", machine / "1")}
    assert modes == {machine: 0o777, machine / "0": 0o750, machine / "1": 0o755}


@pytest.mark.parametrize("seed", range(5))
def test_whatever_begins_and_ends_no_gpu_is_used_twice_and_a_stage_waits_only_if_too_few_are_free(seed: int) -> None:
    chance = random.Random(seed)
    stages: list[dict[str, int]] = []
    for _ in range(40):
        if stages and chance.random() < 0.4:
            for descriptor in stages.pop(chance.randrange(len(stages))).values():
                os.close(descriptor)
        count, used = chance.randint(1, COUNT), [name for stage in stages for name in stage]
        try:
            stages.append(free(count))
            assert len(used) + count <= COUNT
        except Refused:
            assert len(used) + count > COUNT
        used = [name for stage in stages for name in stage]
        assert len(used) == len(set(used))


def test_a_gpu_is_the_same_by_number_and_by_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    held = free(6)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-5a,GPU-6a,GPU-7a6e")
    assert [*free(2)] == ["GPU-6a6e", "GPU-7a6e"]
    os.close(held["5"])
    assert [*free(1)] == ["GPU-5a6e"]


def test_a_slice_has_one_lock_and_slices_do_not_work_together(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    divided = {"mig.mode.current": "Enabled", "slices": [["1g.10gb", "MIG-a1"], ["1g.10gb", "MIG-b2"]]}
    put_nvidia_smi(machine.parent, [divided, {}])
    with monkeypatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "0")
        assert [*free(1)] == ["MIG-a1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-a,MIG-b")
    assert _seen_by_light_work() == ("", "MIG-b2")
    assert [*free(1)] == ["MIG-b2"]
    with pytest.raises(StageError, match=r"2 GPUs are needed .* 0 are visible, beside slices of GPUs \(MIG\)"):
        free(2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    with pytest.raises(StageError, match=r"2 GPUs are needed .* 1 are visible"):
        free(2)


def test_gpus_that_others_use_are_left_out_while_there_are_idle_ones(machine: Path) -> None:
    put_nvidia_smi(machine.parent, [{"memory.used": used} for used in ("81000", "900", "4", "30000", "4", "0")])
    said: list[str] = []
    first = take_gpus(2, said.append, refuse)
    assert [*first] == ["1", "2"], "the windows of a desktop leave a GPU idle"
    assert said == ["left out, since others use them: GPU 3 (29.3 GiB in use), GPU 0 (79.1 GiB in use)"]
    assert [*free(3)] == ["3", "4", "5"], "in the order of CUDA_VISIBLE_DEVICES"
    said.clear()
    assert [*take_gpus(1, said.append, refuse)] == ["0"]
    assert len(said) == 1 and said[0].startswith(
        "taken although others use them, since no emptier GPU is free: GPU 0 (79.1 GiB in use)"
    )


def test_a_driver_that_does_not_answer_lets_nothing_train_without_a_lock(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (machine.parent / "nvidia0").touch()
    monkeypatch.setattr(nvidia, "DEVICES", machine.parent)
    put_nvidia_smi(machine.parent, 0, first="Failed to initialize NVML: Unknown Error\n", status=255)
    with pytest.raises(DriverError, match="Failed to initialize NVML"), own_gpus(2, refused):
        pass


def test_gpus_that_are_missing_are_explained_by_what_the_driver_said(machine: Path) -> None:
    put_nvidia_smi(machine.parent, 7, first=LOST, status=15)
    with pytest.raises(
        StageError, match=r"8 GPUs are needed .* 7 are visible \(nvidia-smi lists 7 GPUs, and then fails"
    ):
        free(8)


def _seen_by_light_work() -> tuple[str, str | None]:
    with one_free_gpu() as none_free:
        return none_free, os.environ.get("CUDA_VISIBLE_DEVICES")


def test_light_work_takes_a_gpu_that_is_free_or_sees_none(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_nvidia_smi(machine.parent, [{"memory.used": "70000"}, {}, {}])
    assert _seen_by_light_work() == ("", "1")
    held = free(2)
    reason = f"2 of 3 GPUs are locked by stages (in {machine}); others use GPU 0 (68.4 GiB in use)"
    assert _seen_by_light_work() == (reason, "")
    held |= free(1)
    assert _seen_by_light_work() == (f"3 of 3 GPUs are locked by stages (in {machine})", "")
    os.close(held["2"])
    assert _seen_by_light_work() == ("", "2")
    assert "CUDA_VISIBLE_DEVICES" not in os.environ and "CUDA_DEVICE_ORDER" not in os.environ
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert _seen_by_light_work()[1] == ""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert _seen_by_light_work() == ("", "")


def test_processes_of_a_stage_see_its_gpus_in_the_order_of_nvidia_smi(monkeypatch: pytest.MonkeyPatch) -> None:
    see = (
        "import json, os; print(json.dumps([os.environ.get(f'CUDA_{x}') for x in ('VISIBLE_DEVICES', 'DEVICE_ORDER')]))"
    )
    seen: list[str] = []
    with own_gpus(2, refused):
        run_process(["-c", see], seen.append)
    assert json.loads(seen[0]) == ["0,1", "PCI_BUS_ID"]
    assert "CUDA_VISIBLE_DEVICES" not in os.environ and "CUDA_DEVICE_ORDER" not in os.environ


def test_without_gpus_nothing_is_locked_and_the_environment_stays(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with own_gpus(2, refused):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    assert not machine.exists()


def test_more_gpus_than_the_machine_shows_are_refused_before_anything_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with (
        pytest.raises(StageError, match=r"4 GPUs are needed .*train.num_processes.* but 2 are visible"),
        own_gpus(4, refused),
    ):
        pass


SAVING = """
import os, signal, sys, time
def save(*_):
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.01)
    sys.exit()
signal.signal(signal.SIGTERM, save)
print("up", flush=True)
signal.pause()
"""


def test_a_killed_stage_keeps_its_gpus_until_the_last_of_its_processes_has_ended(machine: Path) -> None:
    saved = machine.parent / "saved"
    code = f"""
import os, signal
from pathlib import Path
from grpo_core.config.files import dump_config, parse_config
from tasks.processes.gpus import locks as gpu_locks
from tasks.processes.machine import gpus_needed
from tasks.processes.run import run_process
gpu_locks.LOCKS = Path({str(machine)!r})
with gpu_locks.own_gpus(8, print):
    run_process(["-c", {SAVING!r}, {str(saved)!r}], lambda line: os.kill(os.getpid(), signal.SIGKILL))
"""
    killed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    with pytest.raises(Refused):
        free(1)
    take_gpus(8, lambda text: None, saved.touch)


@pytest.mark.parametrize("meanwhile", ["a GPU is free", "told to end", "cut off"])
def test_a_machine_gives_a_launcher_free_gpus_or_waits_until_the_launcher_is_gone(
    machine: Path, meanwhile: str
) -> None:
    held = free(7)
    code = f"""
import os, sys
from pathlib import Path
from tasks.processes import machine
from tasks.processes.gpus import locks as gpu_locks
gpu_locks.LOCKS = Path({str(machine)!r})
machine.POLL_SECONDS, machine.SILENCE_SECONDS = 0.05, {0.1 if meanwhile == "cut off" else 600}
sys.argv[1:] = ["run"]
os.execv = lambda path, words: (print(os.environ["CUDA_VISIBLE_DEVICES"]), sys.exit())
machine.main()
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    with process:
        process.stdin.write(json.dumps({"environment": {}, "arguments": ["--nproc-per-node", "2"]}) + "\n")
        process.stdin.flush()
        assert process.stdout.readline().startswith("waiting for 2 GPUs of this machine: 1 of 8 are free")
        if meanwhile == "told to end":
            process.stdin.close()
            assert process.wait() == 143
        elif meanwhile == "cut off":
            assert process.wait() == 1
        else:
            os.close(held["4"])
            assert process.stdout.readline().strip() == "4,7"


def test_a_machine_takes_as_many_gpus_as_run_there(tmp_path: Path) -> None:
    """Ranks say how many; a vLLM server's configuration does."""
    values = with_keys(config_values(tmp_path, tmp_path), vllm_tensor_parallel_size=2, vllm_data_parallel_size=3)
    (tmp_path / "config.toml").write_text(dump_config(parse_config(with_keys(values, engine="vllm-server"))))
    ranks = ["-m", "tasks.processes.ranks", "--nnodes", "2", "--nproc-per-node", "4", "train.py"]
    assert gpus_needed(ranks) == 4
    assert gpus_needed(["-m", "grpo_core.rollout.vllm.serve", str(tmp_path / "config.toml"), "--port", "1"]) == 6
