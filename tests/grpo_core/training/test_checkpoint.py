"""A checkpoint whose disk does not take it, whose writing is killed, or whose folder other machines do not see."""

from __future__ import annotations

import dataclasses
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from grpo_core.config.files import parse_config
from grpo_core.rollout.types import Rollout
from grpo_core.training import checkpoint as writing
from grpo_core.training.checkpoint import CheckpointError, Checkpoints, require_same_folder
from grpo_core.training.held_out import keep_best, load_best
from grpo_core.training.state import TrainingState, random_state, saved_fields, set_random_state
from tests.conftest import config_values
from tests.grpo_core.allocations import Allocations
from tests.grpo_core.training.several import in_two_processes

CONFIG = parse_config(config_values(Path("model"), Path("data")))


def _checkpoints(folder: Path, size: int = 4) -> Checkpoints:
    model = torch.nn.Linear(size, size)
    optimizer = torch.optim.AdamW(model.parameters())
    return Checkpoints(folder, "this run", CONFIG, Accelerator(cpu=True), model, optimizer, None)


@contextmanager
def _small_disk() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


RAISED_BY: dict[str, Callable[[Checkpoints], object]] = {
    "end": Checkpoints.wait,
    "next save": lambda checkpoints: checkpoints.save(TrainingState(tokens_per_pass=1, updates=5), keep=1),
    "roll-back": lambda checkpoints: checkpoints.restore(healthy=True),
}


@pytest.mark.parametrize("then", RAISED_BY)
def test_a_checkpoint_that_does_not_fit_names_its_file_and_leaves_the_one_before_it(tmp_path: Path, then: str) -> None:
    checkpoints = _checkpoints(tmp_path, 256)
    checkpoints.save(TrainingState(tokens_per_pass=1, updates=2), keep=1)
    checkpoints.wait()
    with _small_disk():
        checkpoints.save(TrainingState(tokens_per_pass=1, updates=4), keep=1)
        with pytest.raises(OSError, match=r"File too large: .*step-000004\.tmp/state\.pt"):
            RAISED_BY[then](checkpoints)
    progress = checkpoints.restore()
    assert progress is not None
    assert progress.updates == 2


def test_a_checkpoint_is_copied_into_what_is_there_without_a_second_state_in_memory(tmp_path: Path) -> None:
    checkpoints = _checkpoints(tmp_path, 256)
    parameters = [*checkpoints.model.parameters()]

    def step() -> None:
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        checkpoints.optimizer.step()

    def tensors() -> list[torch.Tensor]:
        states = [checkpoints.optimizer.state[parameter] for parameter in parameters]
        return [*parameters, *(value for state in states for value in state.values())]

    step()
    checkpoints.save(TrainingState(tokens_per_pass=100, updates=1), keep=1)
    saved, places = [tensor.clone() for tensor in tensors()], [tensor.data_ptr() for tensor in tensors()]
    step()
    with Allocations() as allocations:
        assert checkpoints.restore() is not None
    assert allocations.peak < sum(tensor.nbytes for tensor in saved) / 20
    assert [tensor.data_ptr() for tensor in tensors()] == places
    (tmp_path / "step-000001" / "state.pt").write_bytes(b"")  # nothing reads it any longer
    assert all(torch.equal(tensor, old) for tensor, old in zip(tensors(), saved, strict=True))


def test_the_batch_of_a_checkpoint_does_not_need_its_file_any_longer(tmp_path: Path) -> None:
    checkpoints = _checkpoints(tmp_path)
    values = torch.arange(12.0).view(3, 4)
    fields = {field.name: None for field in dataclasses.fields(Rollout)}
    state = TrainingState(tokens_per_pass=100, updates=1, rollout=Rollout(**{**fields, "sampling_logprobs": values}))
    checkpoints.save(state, keep=1)
    found = checkpoints.restore()
    os.truncate(tmp_path / "step-000001" / "state.pt", 0)  # a page of it that is read from here on ends the process
    assert found is not None and found.rollout is not None
    assert torch.equal(found.rollout.sampling_logprobs, values)


@pytest.mark.parametrize("change", [lambda fields: fields.pop("rates"), lambda fields: fields.update(of_old=1)])
def test_a_checkpoint_with_other_fields_is_refused_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[dict[str, Any]], object]
) -> None:
    def of_another_version(state: TrainingState) -> dict[str, Any]:
        change(fields := saved_fields(state))
        return fields

    checkpoints = _checkpoints(tmp_path)
    monkeypatch.setattr(writing, "saved_fields", of_another_version)
    checkpoints.save(TrainingState(tokens_per_pass=100, updates=1), keep=1)
    with pytest.raises(CheckpointError, match="step-000001 was written by a version of this project that keeps other"):
        checkpoints.restore()


def test_the_state_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    checkpoints = _checkpoints(tmp_path)
    checkpoints.save(TrainingState(tokens_per_pass=100, updates=1), keep=1)
    checkpoints.model(torch.ones(1, 4)).sum().backward()
    checkpoints.optimizer.step()
    with pytest.raises(ValueError, match="the saved state has other tensors"):
        checkpoints.restore()


def test_the_random_states_of_gpus_are_set_only_if_there_are_as_many(monkeypatch: pytest.MonkeyPatch) -> None:
    count, done = 2, []
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: [torch.tensor([n]) for n in range(count)])
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", done.append)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    state = random_state()
    set_random_state(state)
    count = 8
    set_random_state(state)
    assert done == [state["cuda"]]


@pytest.mark.parametrize("before", [None, 0, 1], ids=["the first", "a later one", "written again"])
def test_a_save_killed_at_any_call_of_the_system_leaves_the_checkpoint_before_it_or_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: int | None
) -> None:
    for call in range(100):
        checkpoints = _checkpoints(tmp_path / str(call))
        if before is not None:
            checkpoints.save(TrainingState(tokens_per_pass=1, updates=before), keep=1)
            checkpoints.wait()
        with monkeypatch.context() as patch:
            killed = _kill_at(patch, call)
            try:
                checkpoints.save(TrainingState(tokens_per_pass=1, updates=1), keep=1)
                checkpoints.wait()
            except KeyboardInterrupt:
                assert killed
        progress = _checkpoints(tmp_path / str(call)).restore()
        assert (None if progress is None else progress.updates) in (before, 1)
        if not killed:
            assert progress is not None
            assert call > 5
            return
    pytest.fail("the save never came to its end")


@pytest.mark.parametrize("again", [False, True], ids=["first time", "evaluated again"])
def test_a_new_best_policy_killed_at_any_call_of_the_system_leaves_that_of_each_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    for call in range(100):
        checkpoints, best = _checkpoints(tmp_path / str(call)), tmp_path / f"best-{call}"
        session: Any = SimpleNamespace(
            model=checkpoints.model, policy=SimpleNamespace(is_sharded=False), accelerator=checkpoints.accelerator
        )
        weights = checkpoints.model.weight

        def evaluated(step: int, session: Any = session, best: Path = best, of: Checkpoints = checkpoints) -> None:
            with torch.no_grad():
                of.model.weight.fill_(step)
            keep_best(session, TrainingState(tokens_per_pass=1, updates=step, best_step=step), best, of)

        evaluated(1)
        checkpoints.save(TrainingState(tokens_per_pass=1, updates=1, best_step=1), keep=1)
        checkpoints.wait()
        if again:
            evaluated(2)
        with monkeypatch.context() as patch:
            killed = _kill_at(patch, call)
            with suppress(KeyboardInterrupt):
                evaluated(2)
        load_best(session, 1, best)
        assert weights.unique().tolist() == [1.0]
        evaluated(2)
        load_best(session, 2, best)
        assert weights.unique().tolist() == [2.0]
        assert sorted(path.name for path in best.iterdir()) == ["step-000001", "step-000002"]
        if not killed:
            assert call > 3
            return
    pytest.fail("the policy was never kept")


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
        require_same_folder(tmp_path / "one", Accelerator(cpu=True))
        with pytest.raises(CheckpointError, match="is not what process 1 finds under that path"):
            require_same_folder(tmp_path / f"of-{rank}", Accelerator(cpu=True))

    in_two_processes(tmp_path, start)
    assert list((tmp_path / "one").iterdir()) == []
