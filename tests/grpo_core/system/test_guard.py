"""Which GPU a guarded process takes when its code says "cuda"."""

from __future__ import annotations

import pytest
import torch

from grpo_core.system.guard import own_gpu_first
from tests.visible_gpus import using_gpu

UUIDS = "GPU-5a1c,GPU-77e0,GPU-0b3d"


@pytest.mark.parametrize(
    ("visible", "count", "own", "expected"),
    [
        pytest.param(None, 4, 0, None, id="the first GPU needs no change"),
        pytest.param(None, 4, 2, "2,1,0,3", id="all of the machine are visible"),
        pytest.param("4,5,6,7", 4, 3, "7,5,6,4", id="numbers"),
        pytest.param("4,5,99,6", 2, 1, "5,4,99,6", id="CUDA stops at an unknown one"),
        pytest.param(UUIDS, 3, 1, "GPU-77e0,GPU-5a1c,GPU-0b3d", id="UUIDs"),
        pytest.param("MIG-c6d4,MIG-19f2", 1, 0, None, id="of several MIG slices a process sees the first"),
    ],
)
def test_cuda_means_this_process_s_gpu_in_a_guarded_process(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, count: int, own: int, expected: str | None
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with using_gpu(own, count):
        found = own_gpu_first()
    # "cuda:$LOCAL_RANK" would otherwise be another process's.
    assert found == ({} if expected is None else {"CUDA_VISIBLE_DEVICES": expected, "LOCAL_RANK": "0"})


def test_a_process_that_uses_no_gpu_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: pytest.fail("asking would take memory of a GPU"))
    assert own_gpu_first() == {}
