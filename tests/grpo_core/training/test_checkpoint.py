"""A checkpoint whose disk does not take it, whose writing is killed, or whose folder other machines do not see."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator

from grpo_core.training.checkpoint import CheckpointError, Checkpoints, require_shared
from grpo_core.training.state import TrainingState
from tests.grpo_core.training.several import in_two_processes


def _checkpoints(folder: Path, size: int = 4) -> Checkpoints:
    model = torch.nn.Linear(size, size)
    optimizer = torch.optim.AdamW(model.parameters())
    return Checkpoints(folder, "this run", Accelerator(cpu=True), model, optimizer, None)


def test_a_checkpoint_that_does_not_fit_names_its_file_and_leaves_the_one_before_it(tmp_path: Path) -> None:
    checkpoints = _checkpoints(tmp_path, 256)
    checkpoints.save(TrainingState(tokens_per_pass=1, updates=2), keep=1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(OSError, match=r"File too large: .*step-000004\.tmp/state\.pt"):
            checkpoints.save(TrainingState(tokens_per_pass=1, updates=4), keep=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    progress = checkpoints.restore()
    assert progress is not None
    assert progress.updates == 2


@pytest.mark.slow
@pytest.mark.parametrize("before", [None, 0, 1], ids=["the first", "a later one", "written again"])
def test_a_save_killed_at_any_call_of_the_system_leaves_the_checkpoint_before_it_or_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: int | None
) -> None:
    for call in range(100):
        checkpoints = _checkpoints(tmp_path / str(call))
        if before is not None:
            checkpoints.save(TrainingState(tokens_per_pass=1, updates=before), keep=1)
        with monkeypatch.context() as patch:
            killed = _kill_at(patch, call)
            try:
                checkpoints.save(TrainingState(tokens_per_pass=1, updates=1), keep=1)
            except KeyboardInterrupt:
                assert killed
        progress = _checkpoints(tmp_path / str(call)).restore()
        assert (None if progress is None else progress.updates) in (before, 1)
        if not killed:
            assert progress is not None
            assert call > 5
            return
    pytest.fail("the save never came to its end")


def _kill_at(patch: pytest.MonkeyPatch, call: int) -> list[str]:
    """The process dies at this call of what writes, renames or removes; says which one it was."""
    calls, killed = iter(range(1000)), []
    for name in ("fsync", "rename", "unlink", "rmdir", "mkdir"):
        original = getattr(os, name)

        def counted(*args: object, _name: str = name, _original: object = original, **kwargs: object) -> object:
            if killed or next(calls) == call:  # the dead do nothing more
                killed.append(_name)
                raise KeyboardInterrupt
            return _original(*args, **kwargs)  # type: ignore[operator]

        patch.setattr(os, name, counted)
    return killed


def test_a_checkpoint_folder_that_another_machine_does_not_see_is_refused_on_every_process(tmp_path: Path) -> None:
    def start(rank: int) -> None:
        require_shared(tmp_path / "one", Accelerator(cpu=True))
        with pytest.raises(CheckpointError, match="is not what process 1 finds under that path"):
            require_shared(tmp_path / f"of-{rank}", Accelerator(cpu=True))

    in_two_processes(tmp_path, start)
    assert list((tmp_path / "one").iterdir()) == []
