"""Checkpoints that are written while the training goes on hold what was when they were begun, wherever it ends."""

from __future__ import annotations

import gc
import itertools
import json
import os
import resource
import signal
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch.distributed.checkpoint import filesystem
from torch.distributed.fsdp import fully_shard

from grpo_core.config.files import parse_config
from grpo_core.distributed import shard_mesh, write_tensors
from grpo_core.errors import NotFiniteError
from grpo_core.training import checkpoint, checkpoint_write
from grpo_core.training import loop as trainer
from grpo_core.training.checkpoint import Checkpoints
from grpo_core.training.interrupt import Stopped
from grpo_core.training.loop import train
from grpo_core.training.state import TrainingState
from tests.conftest import config_values, make_model, make_run, with_keys
from tests.grpo_core.training import killing, killing_writes
from tests.grpo_core.training.launching import TWO_PROCESSES, finish, kill_tree, started
from tests.grpo_core.training.several import in_two_processes
from tests.grpo_core.training.training import assert_same, write_when_waited_for

CONFIG = parse_config(config_values(Path("model"), Path("data")))


def _checkpoints(folder: Path, model: torch.nn.Module | None = None) -> Checkpoints:
    model = model or torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    return Checkpoints(folder, "this run", CONFIG, Accelerator(cpu=True), model, optimizer, None)


def _state(updates: int, **fields: Any) -> TrainingState:
    return TrainingState(tokens_per_pass=1, updates=updates, **fields)


def _no_room(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(checkpoint_write, "available_memory", lambda: 0)


def test_a_checkpoint_holds_what_was_when_it_was_begun_and_is_there_before_the_next_is_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_when_waited_for(monkeypatch)
    checkpoints = _checkpoints(tmp_path)
    weights = checkpoints.model.weight
    with torch.no_grad():
        for step in (1, 2, 3):
            weights.fill_(step)
            checkpoints.save(_state(step), keep=2)
            weights.fill_(0)
            assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-{n:06d}" for n in range(1, step)]
    restored = checkpoints.restore()
    assert restored is not None
    assert (restored.updates, weights.unique().tolist()) == (3, [3.0])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000002", "step-000003"]


def test_nothing_of_the_copy_stays_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copies = []

    def copied(tensors: dict[str, Any]) -> dict[str, Any]:
        found = checkpoint_write.in_host_memory(tensors)
        copies.append(weakref.ref(found["model"]["weight"]))
        return found

    monkeypatch.setattr(checkpoint, "in_host_memory", copied)
    checkpoints = _checkpoints(tmp_path)
    gc.disable()
    try:
        checkpoints.save(_state(1), keep=1)
        checkpoints.wait()
        assert [copy() for copy in copies] == [None]
    finally:
        gc.enable()


def test_a_checkpoint_that_is_being_written_keeps_its_best_policy_and_is_marked_healthy_when_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_when_waited_for(monkeypatch)
    checkpoints = _checkpoints(tmp_path)
    checkpoints.save(_state(2, best_step=1), keep=2)
    checkpoints.save(_state(4, best_step=3), keep=2)
    assert checkpoints.best_steps() == {1, 3}
    checkpoints.confirm(4)
    checkpoints.confirm(5)
    checkpoints.wait()
    assert [path.parent.name for path in tmp_path.glob("*/healthy")] == ["step-000004"]
    assert checkpoints.best_steps() == {1, 3}


def test_an_error_of_the_training_waits_for_the_checkpoint_and_is_what_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_when_waited_for(monkeypatch)
    checkpoints = _checkpoints(tmp_path)
    with pytest.raises(ZeroDivisionError), checkpoints.finished():
        checkpoints.save(_state(1), keep=1)
        raise ZeroDivisionError
    assert (tmp_path / "step-000001" / "manifest.json").exists()
    monkeypatch.setattr(checkpoint, "write", _full_disk)
    with (
        pytest.warns(UserWarning, match="the last checkpoint is not written: .* No space left"),
        pytest.raises(ZeroDivisionError),
        checkpoints.finished(),
    ):
        checkpoints.save(_state(2), keep=1)
        raise ZeroDivisionError
    with pytest.raises(OSError, match="No space left"), checkpoints.finished():
        checkpoints.save(_state(3), keep=1)


def _full_disk(_: object, path: Path) -> None:
    raise OSError(28, "No space left on device", str(path))


def test_where_memory_is_short_the_training_waits_and_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints = _checkpoints(tmp_path)
    needed = sum(parameter.nbytes for parameter in checkpoints.model.parameters())
    monkeypatch.setattr(checkpoint, "in_host_memory", None)
    monkeypatch.setattr(checkpoint, "in_thread", None)
    monkeypatch.setattr(checkpoint_write, "available_memory", lambda: 2 * needed - 1)
    for step in (1, 2):
        checkpoints.save(_state(step), keep=2)
        assert (tmp_path / f"step-{step:06d}" / "manifest.json").exists()
    assert (
        capsys.readouterr().out.count("training: the training waits while a checkpoint is written: a copy takes") == 1
    )
    monkeypatch.undo()
    monkeypatch.setattr(checkpoint_write, "available_memory", lambda: 2 * needed)
    for step in (3, 4):
        checkpoints.save(_state(step), keep=2)
    checkpoints.wait()
    assert capsys.readouterr().out.count("training: checkpoints are written while the training goes on") == 1


def test_a_stopped_training_is_saved_once_and_also_where_an_earlier_checkpoint_was_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints, states = _checkpoints(tmp_path), [_state(1), _state(2)]
    written: list[Path] = []
    write = checkpoint.write
    monkeypatch.setattr(checkpoint, "write", lambda content, path: (written.append(path), write(content, path))[-1])
    checkpoints.save(states[0], keep=2)
    checkpoints.save_last(states[0], keep=2)
    assert [path.name for path in written].count("state.pt") == 1
    checkpoints.save_last(states[1], keep=2)
    assert (tmp_path / "step-000002" / "manifest.json").exists()
    monkeypatch.setattr(checkpoint, "write", _full_disk)
    checkpoints.save(_state(3), keep=2)
    assert checkpoints.in_flight is not None
    assert isinstance(checkpoints.in_flight.done.exception(), OSError)
    monkeypatch.undo()
    with pytest.warns(UserWarning, match="an earlier checkpoint is not written: .* No space left"):
        checkpoints.save_last(_state(4), keep=2)
    assert (tmp_path / "step-000004" / "manifest.json").exists()


def test_a_training_whose_output_nothing_reads_any_more_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its flow's process may have been killed."""

    def broken(_: str) -> int:
        raise BrokenPipeError

    monkeypatch.setattr(sys.stdout, "write", broken)
    _checkpoints(tmp_path).save_last(_state(1), keep=1)
    monkeypatch.undo()
    assert (tmp_path / "step-000001" / "manifest.json").exists()


def test_an_error_in_one_process_s_thread_is_raised_by_all_whatever_it_is(tmp_path: Path) -> None:
    def start(rank: int) -> None:
        checkpoints = _checkpoints(tmp_path / "run")
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setattr(checkpoint, "write", _out_of_memory)
            checkpoints.save(_state(1), keep=1)
            with pytest.raises(MemoryError if rank == 1 else OSError, match="no memory for a buffer"):
                checkpoints.wait()

    in_two_processes(tmp_path, start)


def _out_of_memory(*_: object) -> None:
    raise MemoryError("no memory for a buffer")


def test_with_gpus_shares_are_copied_one_after_the_other_by_whatever_device_holds_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch copies ahead on the current device's stream, and a thread's current device is the first one."""
    loaders = []
    for name in ("_SerialCpuLoader", "_OverlappingCpuLoader"):
        loader = getattr(filesystem, name)
        monkeypatch.setattr(filesystem, name, lambda *a, _n=name, _l=loader, **k: (loaders.append(_n), _l(*a, **k))[-1])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    write_tensors({"weight": torch.zeros(4)}, tmp_path)
    assert loaders == ["_SerialCpuLoader"]


def test_processes_agree_whether_their_machines_hold_the_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each process has 64 bytes to copy."""
    tensors = {"model": {"weight": torch.zeros(16)}}

    def start(rank: int) -> None:
        for machine, free, room in [
            ("1", [128, 128], True),
            ("1", [128, 127], False),
            ("2", [256, 256], True),
            ("2", [256, 255], False),
        ]:
            os.environ["LOCAL_WORLD_SIZE"] = machine
            monkeypatch.setattr(checkpoint_write, "available_memory", lambda here=free[rank]: here)
            assert checkpoint_write.has_room_for_copy(tensors)[0] == room, (machine, free)

    in_two_processes(tmp_path, start)


@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "sharded"])
def test_a_full_disk_of_one_process_is_raised_by_all_of_them_with_the_place(tmp_path: Path, sharded: bool) -> None:
    def start(rank: int) -> None:
        model = torch.nn.Linear(256, 256)
        if sharded:
            fully_shard(model, mesh=shard_mesh(within_machine=False))
        checkpoints = _checkpoints(tmp_path / "run", model)
        checkpoints.save(_state(1), keep=1)
        checkpoints.wait()
        if rank == sharded:
            resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))
        checkpoints.save(_state(2), keep=1)
        place = r"step-000002\.tmp" + ("" if sharded else r"/state\.pt")
        with pytest.raises(OSError, match=f"File too large: .*{place}"):
            checkpoints.wait()
        restored = checkpoints.restore()
        assert restored is not None
        assert restored.updates == 1

    in_two_processes(tmp_path, start)


EVERYTHING = {
    "max_steps": 7,
    "save_steps": 2,
    "save_total_limit": 9,
    "num_iterations": 2,
    "beta": 0.1,
    "sync_ref_model": True,
    "ref_model_sync_steps": 2,
    "eval_steps": 3,
    "load_best_model_at_end": True,
    "not_finite_action": "roll_back",
}


@pytest.mark.slow
def test_a_training_whose_checkpoints_are_written_as_late_as_possible_is_that_which_waits_for_each(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rolled back right after the checkpoint of step 4 was begun, told to stop in update 6, and resumed."""
    runs = {}
    for name, patching in {"late": write_when_waited_for, "waits": _no_room}.items():
        runs[name] = run = make_run(tmp_path / name, with_keys(values, **EVERYTHING))
        with monkeypatch.context() as patch:
            patching(patch)
            calls, update = itertools.count(1), trainer.update

            def disturbed(*args: Any, _calls: Any = calls, _update: Any = update) -> Any:
                call = next(_calls)
                if call == 5:
                    raise NotFiniteError("step 5")
                if call == 9:
                    signal.raise_signal(signal.SIGTERM)
                return _update(*args)

            patch.setattr(trainer, "update", disturbed)
            with pytest.raises(Stopped):
                train(run, run / "training")
            train(run, run / "training")
    assert_same(runs["late"], runs["waits"])
    late, waits = (run / "training" / "checkpoints" for run in runs.values())
    names = sorted(path.name for path in late.iterdir())
    assert names == sorted(path.name for path in waits.iterdir())
    assert len(names) > 3
    for name in names:
        assert {path.name for path in (late / name).iterdir()} == {path.name for path in (waits / name).iterdir()}
        one, other = (torch.load(folder / name / "state.pt", weights_only=True) for folder in (late, waits))
        assert _tensors(one).keys() == _tensors(other).keys()
        assert all(value.equal(_tensors(other)[key]) for key, value in _tensors(one).items())


def _tensors(values: dict[str, Any], prefix: str = "") -> dict[str, torch.Tensor]:
    found = {}
    for name, value in values.items():
        if isinstance(value, dict):
            found |= _tensors(value, f"{prefix}{name}.")
        elif isinstance(value, torch.Tensor):
            found[prefix + name] = value
    return found


@pytest.mark.slow
def test_a_training_killed_in_the_middle_of_a_write_goes_on_bit_for_bit_from_the_newest_complete_checkpoint(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values["rewards"] = [{"function": "tests.grpo_core.training.killing_writes:score"}]
    values = with_keys(values, max_steps=5, save_steps=2, save_total_limit=1, num_iterations=2)
    whole = make_run(tmp_path / "whole", values)
    assert killing.train(whole) == 0
    for point, newest in killing_writes.POINTS.items():
        run = make_run(tmp_path / point.replace(" ", "-"), values)
        with monkeypatch.context() as patch:
            patch.setenv("KILLED_AT", point)
            assert os.WTERMSIG(killing.train(run)) == signal.SIGKILL
        assert killing.train(run) == 0
        assert json.loads((run / "training" / "result.json").read_text())["resumed_at_step"] == newest, point
        assert_same(run, whole)


@pytest.mark.e2e
@pytest.mark.parametrize("point", killing_writes.POINTS)
@pytest.mark.parametrize("sharding", ["none", "full"])
def test_two_processes_of_which_one_is_killed_in_the_middle_of_a_write_go_on_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str, sharding: str
) -> None:
    values = config_values(make_model(tmp_path / "model"), tmp_path, engine="transformers")
    values["rewards"] = [{"function": "tests.grpo_core.training.killing_writes:score"}]
    keys = {"num_processes": 2, "per_device_train_batch_size": 4, "num_iterations": 2, "sharding": sharding}
    values = with_keys(values, **keys, max_steps=5, save_steps=2, save_total_limit=1)
    whole, run = (make_run(tmp_path / name, values) for name in ("whole", "run"))
    with monkeypatch.context() as patch:
        patch.setenv("KILLED_AT", point)
        with started(run, tmp_path, 0, *TWO_PROCESSES) as process:
            process.communicate()
            kill_tree(process.pid)
        assert process.returncode
    for folder in (run, whole):
        with started(folder, tmp_path, 0, *TWO_PROCESSES) as process:
            finish(process)
    result = json.loads((run / "training" / "result.json").read_text())
    assert result["resumed_at_step"] == killing_writes.POINTS[point]
    model = Path("training") / "model"
    for file in (whole / model).glob("*.safetensors"):
        assert (run / model / file.name).read_bytes() == file.read_bytes()
