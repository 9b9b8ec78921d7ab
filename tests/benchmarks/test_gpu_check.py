"""`make gpu-check` on a machine without a GPU: cut down, and the same table."""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_check, gpu_checks
from benchmarks.gpu_check import Row
from grpo_core.config.files import parse_config
from grpo_core.rollout.vllm.serve import own_gpus


@pytest.mark.slow
@pytest.mark.parametrize("check", [gpu_checks.hardware, gpu_checks.attention, gpu_checks.head, gpu_checks.waits])
def test_a_check_runs_without_a_gpu_and_fails_nothing(check: Callable[..., None], tmp_path: Path) -> None:
    rows: list[Row] = []
    check(tmp_path, rows.append)
    assert rows
    assert not [row for row in rows if row.passed is False]


@pytest.mark.parametrize(
    ("gpus", "of_server"), [(0, {}), (1, {"CUDA_VISIBLE_DEVICES": "0"}), (2, {"CUDA_VISIBLE_DEVICES": "1"})]
)
def test_a_server_has_room_on_every_machine(
    gpus: int, of_server: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one GPU, it shares the training's."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    config = parse_config(tomllib.loads(gpu_checks._configuration(tmp_path, "vllm-server", lora=False)))
    first = 0 if config.rollout.vllm_weight_transfer == "ipc" else config.train.num_processes
    assert own_gpus(config, first) == of_server


def _checked(monkeypatch: pytest.MonkeyPatch, output: Path, *checks: str) -> dict[str, dict[str, object]]:
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--output", str(output), "--only", *checks])
    gpu_check.main()
    return {result["check"]: result for result in json.loads(output.read_text())["checks"]}


def test_a_check_that_hangs_is_ended_and_said_to_have_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(gpu_check.CHECKS, "hardware", 0.05)
    output = tmp_path / "found.json"
    with pytest.raises(SystemExit, match=f"failed: hardware. Please send {output} back"):
        _checked(monkeypatch, output, "hardware")
    [result] = json.loads(output.read_text())["checks"]
    assert not result["passed"]
    assert "stopped after 0.05 s" in result["output"]
    assert "stopped after 0.05 s" in capsys.readouterr().out


def test_a_row_says_what_was_found_what_was_demanded_and_whether_it_passed() -> None:
    rows = [{"what": "drift", "found": "0.2", "demanded": "at most 0.1", "passed": False}]
    text = gpu_check.table({"rows": rows, "output": "Traceback\nValueError: wrong"})
    assert [word for word in ("drift", "0.2", "at most 0.1", "FAILED", "ValueError: wrong") if word not in text] == []


@pytest.mark.e2e
def test_a_training_is_continued_and_divided_without_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = _checked(monkeypatch, tmp_path / "found.json", "memory", "resume", "processes")
    assert all(result["passed"] for result in found.values())
    assert capsys.readouterr().out.count("needs a GPU") == 1
