"""Files that a kill or a power cut left half, or a disk damaged: a training goes on without them, or says so."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from grpo_core.planning.plan import load_plan
from grpo_core.training import checkpoint
from grpo_core.training import log as records
from grpo_core.training.checkpoint import CheckpointError
from grpo_core.training.loop import train
from tests.conftest import make_run, with_keys
from tests.grpo_core.training.disk import Disk
from tests.grpo_core.training.training import assert_same, figures_of, interrupted


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["cut off", "one bit", "gone", "manifest", "manifest is a text"])
def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_it_used(
    values: dict[str, Any], tmp_path: Path, damage: str
) -> None:
    run, whole = interrupted(values, tmp_path)
    checkpoints = run / "training" / "checkpoints"
    assert [folder.name for folder in sorted(checkpoints.iterdir())] == ["step-000002", "step-000004"]
    file = checkpoints / "step-000004" / ("manifest.json" if "manifest" in damage else "state.pt")
    content = bytearray(file.read_bytes())
    if damage == "one bit":
        content[len(content) // 2] ^= 1
    file.write_bytes(content if damage == "one bit" else content[: len(content) // 2])
    if damage == "gone":
        file.unlink()
    if damage == "manifest is a text":
        file.write_text('"checksums"')
    with pytest.warns(UserWarning, match=r"step-000004 is damaged .* the one before it is used"):
        train(run, run / "training")
    assert (checkpoints / "step-000004.damaged").is_dir()
    assert json.loads((run / "training" / "result.json").read_text())["resumed_at_step"] == 2
    assert_same(run, whole)


def test_a_training_with_only_damaged_checkpoints_is_refused_and_begins_when_they_are_removed(
    values: dict[str, Any], tmp_path: Path
) -> None:
    run, whole = interrupted(values, tmp_path)
    checkpoints = run / "training" / "checkpoints"
    for folder in checkpoints.iterdir():
        (folder / "state.pt").write_bytes(b"cut off")
    message = "no undamaged checkpoint is left in .*, only step-000002.damaged, step-000004.damaged"
    with pytest.warns(UserWarning, match="is damaged"), pytest.raises(CheckpointError, match=message):
        train(run, run / "training")
    with pytest.raises(CheckpointError, match=message):
        train(run, run / "training")
    assert len(figures_of(run)) == 6, "what there is of the training stays"
    shutil.rmtree(checkpoints)
    train(run, run / "training")
    assert json.loads((run / "training" / "result.json").read_text())["resumed_at_step"] is None
    assert_same(run, whole)


def _zero_lines(path: Path, steps: list[int]) -> None:
    """The lines of these steps, line breaks included, as a power cut may leave them."""
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(bytes(len(line)) if n in steps else line for n, line in enumerate(lines, 1)))


def test_zeros_in_the_place_of_metrics_after_the_checkpoint_are_written_over(
    values: dict[str, Any], tmp_path: Path
) -> None:
    run, whole = interrupted(values, tmp_path)
    _zero_lines(run / "training" / "metrics.jsonl", [5])
    train(run, run / "training")
    assert_same(run, whole)


def test_metrics_lost_before_the_checkpoint_are_named_and_the_training_goes_on(
    values: dict[str, Any], tmp_path: Path
) -> None:
    from tasks.processes.training import check_result  # needs prefect, which a training does not

    run, whole = interrupted(values, tmp_path)
    _zero_lines(run / "training" / "metrics.jsonl", [2, 3])
    with pytest.warns(UserWarning, match=r"has lost the lines of steps \[2, 3\]"):
        result = train(run, run / "training")
    assert result["steps_without_metrics"] == [2, 3]
    assert figures_of(run) == [row for row in figures_of(whole) if row["step"] not in (2, 3)]
    check_result(result, run / "training" / "metrics.jsonl", load_plan(run / "plan.json"))


def test_completions_of_updates_that_are_made_again_do_not_stay(values: dict[str, Any], tmp_path: Path) -> None:
    run, _ = interrupted(values, tmp_path)
    folder = run / "training" / "completions"
    planned = sorted(folder.iterdir())
    (folder / "rollout-000099.parquet").write_bytes(b"torn")
    planned[-1].write_bytes(b"torn")
    train(run, run / "training")
    assert sorted(folder.iterdir()) == planned
    assert sum(len(pq.read_table(path)) for path in planned) == load_plan(run / "plan.json").completions


def test_a_power_cut_finds_the_newest_checkpoint_and_the_result_s_model_on_the_disk(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run", with_keys(values, save_steps=1, save_total_limit=1, max_steps=3))
    disk, output = Disk(monkeypatch), run / "training"
    remove, publish = checkpoint._remove, records.publish

    def removing(folder: Path) -> None:
        step = int(folder.name[-6:]) + 1
        assert disk.holds(output / "checkpoints" / f"step-{step:06d}")
        assert disk.holds(output / "metrics.jsonl")
        assert len(figures_of(run)) >= step
        remove(folder)

    def publishing(partial: Path, final: Path) -> None:
        if final.name == "result.json":
            assert disk.holds(output / "model")
        publish(partial, final)
        assert disk.holds(final)

    monkeypatch.setattr(checkpoint, "_remove", removing)
    monkeypatch.setattr(records, "publish", publishing)
    train(run, output)
    assert (output / "result.json").exists()


def test_a_kill_while_a_checkpoint_is_replaced_loses_none(values: dict[str, Any], tmp_path: Path) -> None:
    run, whole = interrupted(values, tmp_path)
    newest = run / "training" / "checkpoints" / "step-000004"
    newest.rename(newest.with_suffix(".old"))
    newest.with_suffix(".tmp").mkdir()
    train(run, run / "training")
    assert json.loads((run / "training" / "result.json").read_text())["resumed_at_step"] == 4
    assert_same(run, whole)


@pytest.mark.parametrize("left", ["state.pt", "manifest.json"])
def test_half_an_older_checkpoint_disturbs_no_later_one(values: dict[str, Any], tmp_path: Path, left: str) -> None:
    run, whole = interrupted(values, tmp_path)
    checkpoints = run / "training" / "checkpoints"
    shutil.rmtree(checkpoints / "step-000004")
    half = checkpoints / "step-000000"
    half.mkdir()
    (half / "healthy").touch()
    (half / left).write_bytes((checkpoints / "step-000002" / left).read_bytes()[:20])
    train(run, run / "training")
    assert sorted(folder.name for folder in checkpoints.iterdir()) == ["step-000002", "step-000004"]
    assert (checkpoints / "step-000002" / "healthy").exists()
    assert_same(run, whole)


def test_a_kill_while_a_checkpoint_is_removed_leaves_no_half_of_it(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, whole = (make_run(tmp_path / name, with_keys(values, save_steps=1, save_total_limit=1)) for name in "rw")
    train(whole, whole / "training")
    rmtree = shutil.rmtree

    def killed(path: Path, **options: Any) -> None:
        for file in sorted(Path(path).glob("[mr]*")) if Path(path).parent.name == "checkpoints" else ():
            file.unlink()
            raise KeyboardInterrupt
        rmtree(path, **options)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shutil, "rmtree", killed)
        train(run, run / "training")
    names = sorted(folder.name for folder in (run / "training" / "checkpoints").iterdir())
    assert names == ["step-000001.tmp", "step-000002", "step-000003"]
    train(run, run / "training")
    assert_same(run, whole)


def test_a_half_written_checkpoint_is_not_read(values: dict[str, Any], tmp_path: Path) -> None:
    run, whole = interrupted(values, tmp_path)
    torn = run / "training" / "checkpoints" / "step-000099.tmp"
    torn.mkdir()
    (torn / "state.pt").write_bytes(b"half")
    train(run, run / "training")
    assert not torn.exists()
    assert_same(run, whole)
