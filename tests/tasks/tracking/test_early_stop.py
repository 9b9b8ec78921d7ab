"""An arm's training is held against the arms before it, update by update, on the same prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from grpo_core.config.files import parse_config
from grpo_core.run_files import HELD_OUT_SCORES
from grpo_core.system.tables import read_parquet
from tasks.stages.condition import MARKER
from tasks.stages.errors import ArmStopped
from tasks.stages.files import write_text
from tasks.stages.lineage import lineage_keys
from tasks.stages.table import TRAIN
from tasks.tracking.early_stop import Race, stopped_arms, trainings_of, why_stopped, write_rule
from tests.conftest import config_values, make_run, write_sums

NAMES = [f"sums.sweep.{arm}" for arm in "abc"]


@pytest.fixture
def arms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    monkeypatch.setenv("GRPO_STORAGE", str(tmp_path))
    (tmp_path / "sweeps" / "sums.sweep").mkdir(parents=True)
    (tmp_path / "model").mkdir()
    found = {}
    for name in NAMES:
        found[name] = run = make_run(tmp_path / "runs" / name, values(tmp_path, name))
        (run / "dataset" / "report.json").write_text('{"made": {"eval": "the same"}}')
    return found


def values(folder: Path, name: str) -> dict[str, Any]:
    write_sums(folder / "train.parquet", 10, 34)
    rewards = [{"function": "numeric_match"}, {"function": "numeric_match", "name": "again"}]
    return {
        **config_values(folder / "model", folder, eval_steps=2),
        "name": name,
        "rewards": rewards,
        "registry": {"sweep": "sums.sweep"},
    }


def trainings(arms: dict[str, Path]) -> dict[str, str]:
    return trainings_of([parse_config(values(run.parents[1], name)) for name, run in arms.items()])


def ruled(arms: dict[str, Path]) -> tuple[Path, Path, dict[str, str]]:
    """Two arms of a sweep that stops those that fall behind, and its rule."""
    first, second, _ = arms.values()
    write_rule("sums.sweep", rule := trainings(arms), 0.05)
    return first, second, rule


def finish(run: Path, key: str) -> Path:
    """Leave a finished training with this lineage key; returns its folder."""
    TRAIN.path(run).mkdir()
    write_text(TRAIN.receipt_path(run), json.dumps({"lineage_key": key}))
    return TRAIN.path(run)


def score(folder: Path, update: int, reward: float, count: int = 16) -> None:
    (folder / HELD_OUT_SCORES).mkdir(parents=True, exist_ok=True)
    scores = pl.DataFrame({"row": range(count), "reward": [reward] * count})
    scores.write_parquet(folder / HELD_OUT_SCORES / f"step-{update:06d}.parquet")


def race(run: Path, updates: int = 8, **sections: Any) -> Race:
    config = parse_config({**values(run.parents[1], run.name), **sections})
    folder = TRAIN.partial(run)
    folder.mkdir(exist_ok=True)
    write_text(folder / MARKER, f'{{"lineage_key": "{lineage_keys(config)["train"]}"}}')
    return Race(run, config, folder, updates)


def test_an_arm_is_stopped_by_what_the_arms_before_it_did_after_the_same_update(arms: dict[str, Path]) -> None:
    first, second, third = arms.values()
    rule = trainings(arms)
    write_rule("sums.sweep", rule, 0.05)
    finish(first, rule[first.name])
    for update in (2, 4, 6, 8):
        score(TRAIN.path(first), update, 2.0)
    race(first).look()
    running = race(second)
    running.look()
    score(TRAIN.partial(second), 2, 1.9)
    running.look()
    score(TRAIN.partial(second), 4, 0.0)
    reason = "stopped after update 4 of 8, 2.000 in reward behind sums.sweep.a"
    with pytest.raises(ArmStopped, match=rf"^{reason}$"):
        running.look()
    config = parse_config(values(second.parents[1], second.name))
    assert why_stopped(second, config) == reason
    changed = config.model_copy(update={"seed": 1})
    assert why_stopped(second, changed) == "", "another training would be begun"
    assert stopped_arms("sums.sweep") == {"sums.sweep.b": reason}

    running = race(third)
    score(TRAIN.partial(third), 2, 1.9)
    score(TRAIN.partial(third), 4, 2.0)
    running.look()
    score(TRAIN.partial(third), 8, 0.0)
    running.look()  # what is trained to its end is evaluated


@pytest.mark.parametrize("without", ["rule", "arm", "prompts", "update", "its training", "own training"])
def test_nothing_is_stopped_without(arms: dict[str, Path], without: str) -> None:
    """An earlier arm's training of other values, which a change of the configuration has left behind, is no rival, and
    a training of other values than the sweep's is no arm."""
    first, second, _ = arms.values()
    rule = trainings(arms)
    finish(first, "another" if without == "its training" else rule[first.name])
    if without == "own training":
        rule[second.name] = "another"
    if without == "arm":
        rule = {first.name: rule[first.name]}
    write_rule("sums.sweep", rule, None if without == "rule" else 0.05)
    if without == "prompts":
        (first / "dataset" / "report.json").write_text('{"made": {"eval": "others"}}')
    score(TRAIN.path(first), 3 if without == "update" else 2, 2.0)
    score(TRAIN.partial(second), 2, 0.0)
    race(second).look()


def test_an_unfinished_training_is_the_rival_beside_a_finished_one_of_other_values(arms: dict[str, Path]) -> None:
    first, second, _ = ruled(arms)
    score(finish(first, "another"), 2, 0.0)
    race(first)
    score(TRAIN.partial(first), 2, 2.0)
    score(TRAIN.partial(second), 2, 0.0)
    with pytest.raises(ArmStopped):
        race(second).look()


@pytest.mark.parametrize(("groups", "stops"), [(16, True), (2, False)])
def test_prompts_of_a_group_count_once(arms: dict[str, Path], groups: int, stops: bool) -> None:
    """Sixteen lost prompts stop an arm, the same of two passages do not."""
    first, second, rule = ruled(arms)
    prompts = second / "dataset" / "eval.parquet"
    read_parquet(prompts).with_columns(passage=pl.int_range(16) % groups).write_parquet(prompts)
    score(finish(first, rule[first.name]), 2, 2.0)
    score(TRAIN.partial(second), 2, 0.0)
    running = race(second, evaluation={"group_column": "passage"})
    if stops:
        with pytest.raises(ArmStopped):
            running.look()
    else:
        running.look()


def test_a_training_that_goes_on_is_no_longer_stopped(arms: dict[str, Path]) -> None:
    first, second, rule = ruled(arms)
    score(finish(first, rule[first.name]), 2, 2.0)
    running = race(second)
    score(TRAIN.partial(second), 2, 0.0)
    with pytest.raises(ArmStopped):
        running.look()
    write_rule("sums.sweep", rule, None)
    race(second).look()
    assert stopped_arms("sums.sweep") == {}, "whatever becomes of it now"
    write_rule("sums.sweep", rule, 0.05)
    (TRAIN.partial(second) / HELD_OUT_SCORES / "step-000002.parquet").unlink()
    race(second).look()
    assert stopped_arms("sums.sweep") == {}
