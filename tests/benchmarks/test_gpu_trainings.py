"""The parts of `make gpu-check` that train: each passes here, and fails with the fault that it is for."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.gpu import trainings
from tests.benchmarks.test_gpu_check import Work, failed

pytestmark = pytest.mark.e2e

# Runs in place of `python -m grpo_core.train`, with the fault planted first.
PLANTED = """
import os
import sys
from pathlib import Path
{fault}
if __name__ == "__main__":
    from grpo_core.train import main
    main()
"""
ANEW = """
from grpo_core.training.checkpoint import Checkpoints
Checkpoints.restore = lambda *_, **__: None
"""
EARLIER = """
import shutil
for folder in sorted(Path(sys.argv[1], "training", "checkpoints").glob("step-*"))[-1:]:
    shutil.rmtree(folder)
"""
OTHER_WEIGHTS = """
import torch
from grpo_core.training import checkpoint
restore = checkpoint.Checkpoints.restore
def changed(self, **keys):
    state = restore(self, **keys)
    if state is not None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(1.5)
    return state
checkpoint.Checkpoints.restore = changed
"""
# As kernels that add in an order of their own do.
ROUNDING = """
import random
import torch
step = torch.optim.AdamW.step
def rounded(self, *arguments):
    step(self, *arguments)
    with torch.no_grad():
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(1 + random.SystemRandom().uniform(-1e-5, 1e-5))
torch.optim.AdamW.step = rounded
"""
# The rehearsal of the end would find it.
UNMERGED = """
from grpo_core.model import saving
from grpo_core.training import loop
loop.rehearse_end = lambda *_: None
saving.load_trainable_state = lambda *_: None
"""
NOT_KEPT = """
from grpo_core.training import optimizer
own = optimizer._to_host
optimizer._to_host = lambda value, place: own(value.zero_() if value.ndim else value, place)
"""
UNSUMMED = """
from grpo_core import distributed
distributed.average_gradients = lambda _: None
"""
# In sampling and training alike.
OTHER_KERNEL = """
from transformers.models.qwen3_5 import modeling_qwen3_5 as hybrids
for name in ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"):
    def other(*arguments, own=getattr(hybrids, name), **keys):
        output, state = own(*arguments, **keys)
        return output.roll(1, -1), state
    setattr(hybrids, name, other)
"""


@pytest.mark.parametrize(
    "work", [trainings.resume, trainings.deterministic, trainings.adapters, trainings.eight_bits, trainings.processes]
)
def test_a_part_that_trains_passes(tmp_path: Path, work: Work) -> None:
    assert failed(work, tmp_path) == []


def test_the_part_of_hybrids_fails_without_their_kernels_or_with_one_that_computes_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels need a GPU."""
    assert failed(trainings.hybrid, tmp_path / "right") == ["kernels: functions without a kernel"]
    program = tmp_path / "planted.py"
    program.write_text(PLANTED.format(fault=OTHER_KERNEL))
    monkeypatch.setattr(trainings, "TRAIN", [str(program)])
    found = failed(trainings.hybrid, tmp_path / "wrong")
    assert "python: log-probabilities from the engine's with kernels" in found
    assert "kernels: log-probabilities from the engine's with kernels" not in found


@pytest.mark.parametrize(
    ("work", "fault", "rows"),
    [
        (trainings.resume, ANEW, ["continued: where it begins", "updates that were not made again"]),
        (trainings.resume, EARLIER, ["continued: where it begins", "updates that were not made again"]),
        (trainings.resume, OTHER_WEIGHTS, ["first resumed update: equal completions"]),
        (trainings.deterministic, ROUNDING, ["cut: tensors that equal", "offloaded: tensors that equal"]),
        (trainings.adapters, UNMERGED, ["LoRA: merged model without", "LoRA, 4 bits: merged model without"]),
        (trainings.eight_bits, NOT_KEPT, ["moments of 8 bits, offloaded: tensors that equal"]),
        (trainings.processes, UNSUMMED, ["grad_norm of the first update"]),
    ],
    ids=[
        "starts from the beginning",
        "from an earlier step",
        "with other weights",
        "rounds differently each time",
        "is not merged",
        "moments are not kept",
        "gradients are not averaged",
    ],
)
def test_a_part_that_trains_fails_with_its_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, work: Work, fault: str, rows: list[str]
) -> None:
    program = tmp_path / "planted.py"
    program.write_text(PLANTED.format(fault=fault))
    monkeypatch.setattr(trainings, "TRAIN", [str(program)])
    found = failed(work, tmp_path / "scratch")
    assert [row for row in rows if not any(name.startswith(row) for name in found)] == []
