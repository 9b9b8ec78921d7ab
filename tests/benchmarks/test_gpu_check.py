"""`make gpu-check` on a machine without a GPU: cut down, and the same table."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_checks
from benchmarks.gpu_check import Row
from grpo_core.config.files import parse_config
from tasks.processes.vllm_servers import _devices


@pytest.mark.slow
@pytest.mark.parametrize("check", [gpu_checks.hardware, gpu_checks.attention, gpu_checks.head, gpu_checks.waits])
def test_a_check_runs_without_a_gpu_and_fails_nothing(check: Callable[..., None], tmp_path: Path) -> None:
    rows: list[Row] = []
    check(tmp_path, rows.append)
    assert rows
    assert not [row for row in rows if row.passed is False]


@pytest.mark.parametrize(("gpus", "of_server"), [(0, [{}]), (1, ["0"]), (2, ["1"])])
def test_a_server_has_room_on_every_machine(
    gpus: int, of_server: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one GPU, it shares the training's."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    config = parse_config(tomllib.loads(gpu_checks._configuration(tmp_path, "vllm-server", lora=False)))
    assert [found and found["CUDA_VISIBLE_DEVICES"] for found in _devices(config)] == of_server
