"""What a checkpoint does when its disk does not take it."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator

from grpo_core.checkpoint import Checkpoints
from grpo_core.progress import Progress


def test_a_checkpoint_that_does_not_fit_names_its_file_and_leaves_the_one_before_it(tmp_path: Path) -> None:
    model = torch.nn.Linear(256, 256)
    optimizer = torch.optim.AdamW(model.parameters())
    checkpoints = Checkpoints(tmp_path, "this run", Accelerator(), model, optimizer, None)
    checkpoints.save(Progress(rows_per_pass=1, updates=2), keep=1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(OSError, match=r"File too large: .*step-000004\.tmp/state\.pt"):
            checkpoints.save(Progress(rows_per_pass=1, updates=4), keep=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    progress = checkpoints.restore()
    assert progress is not None
    assert progress.updates == 2
