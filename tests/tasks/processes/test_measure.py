"""A pace is measured once for what it depends on, and a measurement that fails is a sentence, not an end."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from grpo_core.config.files import parse_config
from grpo_core.planning.pace import Pace
from grpo_core.planning.plan import make_plan, plan_inputs
from grpo_core.planning.shapes import PromptLengths
from tasks.processes import measure
from tasks.processes.gpus import locks as gpu_locks
from tasks.processes.gpus.locks import own_gpus
from tasks.processes.run import TimeLimitError
from tasks.stages.errors import StageError
from tests.conftest import config_values, write_sums
from tests.nvidia_smi import put_nvidia_smi
from tests.tasks.processes.measuring import Machine

MEASURED = Pace(1.0, 2.0, 0.1, 9.0, 1e-9, 6.0, 16, "measured")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    return Machine(monkeypatch, tmp_path, asdict(MEASURED))


def _measured(folder: Path, prompts: Path | None = None, said: list[str] | None = None, **keys: Any) -> Pace | str:
    config = parse_config(config_values(folder / "model", folder, **keys))
    plan = make_plan(plan_inputs(config, 1000))
    return measure.measured_pace(
        config, plan, PromptLengths(6.0, 9, "given"), None, prompts, (said if said is not None else []).append
    )


def test_a_pace_is_measured_once_and_again_when_something_that_it_depends_on_changes(
    machine: Machine, tmp_path: Path
) -> None:
    prompts = write_sums(tmp_path / "train.parquet", 0, 8)
    for _ in range(2):
        assert _measured(tmp_path, prompts) == MEASURED
    assert len(machine.asked) == 1
    for keys in ({"learning_rate": 0.5}, {"max_steps": 77}, {"save_steps": 3}):
        _measured(tmp_path, prompts, **keys)
    assert len(machine.asked) == 1
    for keys in ({"max_completion_length": 5}, {"use_peft": True}, {"num_generations": 8}, {"num_processes": 2}):
        _measured(tmp_path, prompts, **keys)
    _measured(tmp_path)
    (tmp_path / "model" / "config.json").write_text('{"hidden_size": 7}')
    _measured(tmp_path, prompts)
    write_sums(tmp_path / "train.parquet", 0, 400)
    _measured(tmp_path, prompts)
    assert len(machine.asked) == 8
    assert machine.asked[0]["completions"] == 16
    assert [asked["prompts"] for asked in machine.asked].count("") == 1


def test_a_pace_of_a_busy_machine_says_so_and_is_not_kept(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (1000.0, 0.0, 0.0))
    how = "measured, while other processes kept the machine busy"
    assert [_measured(tmp_path) for _ in range(2)] == [replace(MEASURED, how=how)] * 2
    assert len(machine.asked) == 2


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (StageError("ended with status 1"), "the pace could not be measured: out of memory"),
        (TimeLimitError("had not ended"), "did not measure its pace within 120 s"),
    ],
)
def test_a_measurement_that_fails_says_why(machine: Machine, tmp_path: Path, error: Exception, sentence: str) -> None:
    machine.printed, machine.error = ["Traceback", "out of memory"], error
    found = _measured(tmp_path)
    assert isinstance(found, str) and sentence in found
    machine.printed, machine.error = [json.dumps(asdict(MEASURED))], None
    assert _measured(tmp_path) == MEASURED


def test_a_refused_model_is_refused_by_the_plan(machine: Machine, tmp_path: Path) -> None:
    machine.printed = [json.dumps({"refused": "its layers are of a kind that nothing samples from"})]
    with pytest.raises(StageError, match="the training would refuse this model: its layers are of a kind"):
        _measured(tmp_path)


def test_a_measurement_is_announced_and_a_kept_pace_is_not(machine: Machine, tmp_path: Path) -> None:
    said: list[str] = []
    for _ in range(2):
        assert _measured(tmp_path, said=said) == MEASURED
    assert len(said) == 1
    assert "measuring its pace on this machine, for 120 s at most" in said[0]


@pytest.mark.slow
def test_a_pace_is_measured_on_a_gpu_that_is_free_or_not_at_all(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_nvidia_smi(tmp_path, [{"memory.used": "30000"}, {}])
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(gpu_locks, "LOCKS", tmp_path / "locks")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    said: list[str] = []
    with own_gpus(1, said.append):
        del os.environ["CUDA_VISIBLE_DEVICES"]  # not by monkeypatch, which would put it back for later tests
        found = _measured(tmp_path, said=said)
    assert isinstance(found, str) and machine.asked == []
    assert "the pace is not measured, since no GPU is free: 1 of 2 GPUs are locked by stages" in found
    assert "others use GPU 0 (29.3 GiB in use)" in found
    assert not [text for text in said if "measuring" in text]
    assert _measured(tmp_path) == MEASURED
    assert machine.seen == ["1"]


@pytest.mark.slow
@pytest.mark.parametrize("content", ["", "[1]", "{}", '{"sample_seconds": 1}', '{"how": 3}', "[" * 100_000, "\xff\x00"])
def test_a_damaged_file_of_a_pace_is_replaced(content: str, machine: Machine, tmp_path: Path) -> None:
    _measured(tmp_path)
    (kept,) = (tmp_path / "storage" / "pace").iterdir()
    whole = kept.read_bytes()
    kept.write_text(content, encoding="latin-1")
    assert _measured(tmp_path) == MEASURED
    assert kept.read_bytes() == whole


def test_a_storage_that_cannot_be_written_prevents_no_plan(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(measure, "write_text", full)
    assert _measured(tmp_path) == MEASURED
    (tmp_path / "file").touch()
    monkeypatch.setenv("GRPO_STORAGE", str(tmp_path / "file"))
    assert f"{tmp_path / 'file' / 'pace'} has to be writable" in str(_measured(tmp_path))


def test_a_large_config_of_a_model_does_not_make_the_command_too_long(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "model" / "config.json").write_text(json.dumps({"unused": "x" * 200_000}))
    assert _measured(tmp_path) == MEASURED
    assert len(json.dumps(machine.asked[0])) < 10_000


def test_nothing_is_measured_of_a_model_that_is_elsewhere_or_where_it_is_not_wanted(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model" / "config.json").unlink()
    assert "no such folder with a config.json" in str(_measured(tmp_path))
    monkeypatch.setenv("GRPO_MEASURE", "0")
    assert "GRPO_MEASURE=0" in str(_measured(tmp_path))
    assert machine.asked == []
