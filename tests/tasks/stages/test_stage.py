"""What is up to date, storages of earlier versions too, and what a stage refuses to work on."""

from __future__ import annotations

import copy
import json
import logging
import os
import re
import shutil
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flows.cli.main import app
from grpo_core.config.files import with_keys
from tasks.stages.condition import MARKER, conditions
from tasks.stages.errors import Interrupted, StageError
from tasks.stages.files import write_text
from tasks.stages.run import Context
from tasks.stages.run_directory import find_runs, read_config
from tasks.stages.table import EVALUATE, PLAN, REGISTER, STAGES, TRAIN, VALIDATE, Stage
from tests.conftest import write_sums
from tests.grpo_core.training.disk import Disk
from tests.tasks.stages.small_stages import Values, configure, do, outdated, pipeline, validate


def newer(name: str) -> Callable[[Context], Values]:
    """The work of a validate whose source has other prompts under the same name now, as one on the hub may."""

    def validate_again(context: Context) -> Values:
        receipt = validate(context)
        write_sums(context.partial / f"{name}.parquet", 10, 35)
        return receipt

    return validate_again


@pytest.mark.parametrize(
    ("key", "value", "stale"),
    [
        ("data.eval_split", "validation", ["validate", "plan", "train", "evaluate", "register"]),
        ("train.max_steps", 9, ["plan", "train", "evaluate", "register"]),
        ("train.gradient_checkpointing", True, ["plan"]),
        ("algorithm.epsilon", 0.1, ["train", "evaluate", "register"]),
        ("evaluation.confidence", 0.9, ["evaluate", "register"]),
        ("evaluation.max_completion_length", 9, ["validate", "evaluate", "register"]),
        ("registry.alias", "challenger", ["register"]),
        ("promotion.metric", "reward", ["register"]),
        ("health.max_kl", 3.0, []),
        ("rewards.0.timeout", 7.0, ["validate"]),
    ],
)
def test_an_edit_makes_stale_what_depends_on_it_and_the_pipeline_runs_just_that(
    run: Path, values: Values, key: str, value: Any, stale: list[str]
) -> None:
    configure(run, with_keys(values, {key: value}))
    assert outdated(run) == dict.fromkeys(stale, f"changed: {key}")
    assert pipeline(run) == stale
    assert outdated(run) == {}


def test_a_batch_that_is_divided_otherwise_is_planned_again_and_not_trained(run: Path, values: Values) -> None:
    divided = {"train.per_device_train_batch_size": 4, "train.num_processes": 2, "train.sharding": "full"}
    configure(run, with_keys(values, divided))
    assert pipeline(run) == ["plan"]
    configure(run, with_keys(values, {**divided, "train.gradient_accumulation_steps": 4}))
    assert pipeline(run) == ["plan", "train", "evaluate", "register"]


def test_data_and_rewards_that_changed_under_their_names_are_named(
    run: Path, values: Values, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_sums(tmp_path / "train.parquet", 11, 35)
    monkeypatch.setattr("grpo_core.fingerprint.source_of", lambda reward: b"changed")
    sources = ["source of rewards.0 (numeric_match)", "source of rewards.1 (length)"]
    assert outdated(run)["validate"] == f"changed: data.train, {', '.join(sources)}"
    configure(run, {**values, "seed": 1})
    assert outdated(run)["train"] == f"changed: data.train, {', '.join(sources)} and 1 more"


def test_a_receipt_without_inputs_is_stale_and_a_copied_run_keeps_its_times(run: Path, tmp_path: Path) -> None:
    receipt = TRAIN.read_receipt(run)
    os.utime(TRAIN.receipt_path(run), (0, 0))
    runner = CliRunner(env={"COLUMNS": "200"})
    assert f"{datetime.fromtimestamp(receipt['made_at']):%Y-%m-%d}" in runner.invoke(app, ["status", "test"]).output
    assert "1970-01-01" not in runner.invoke(app, ["status", "test"]).output
    del receipt["inputs"]
    write_text(TRAIN.receipt_path(run), json.dumps({**receipt, "lineage_key": "of an older version"}))
    assert outdated(run)["train"] == "inputs changed"


@pytest.mark.parametrize(
    ("stage", "stale"),
    [
        (VALIDATE, {}),
        (PLAN, {}),
        (TRAIN, {"evaluate": "train was made again", "register": "train was made again"}),
        (EVALUATE, {"register": "evaluate was made again"}),
        (REGISTER, {}),
    ],
    ids=lambda value: value.name if isinstance(value, Stage) else "",
)
def test_a_stage_made_again_makes_stale_what_was_made_from_it_unless_it_came_out_the_same(
    run: Path, stage: Stage, stale: dict[str, str]
) -> None:
    assert do(stage, run, force=True)
    assert outdated(run) == stale
    assert pipeline(run) == list(stale)
    assert pipeline(run) == []


def test_data_that_changed_under_its_name_on_the_hub_is_trained_on_once_it_is_validated_again(run: Path) -> None:
    do(VALIDATE, run, force=True, work=newer("train"))
    assert outdated(run)["train"] == "validate was made again"


def test_an_evaluation_set_that_is_added_changed_or_removed_is_evaluated_on_and_trains_nothing_again(
    run: Path, values: Values, tmp_path: Path
) -> None:
    hard = {"name": "hard", "data": str(write_sums(tmp_path / "hard.parquet", 80, 90))}
    for sets in ([hard], [], [hard]):
        configure(run, {**values, "evaluation": {"sets": sets}})
        assert set(outdated(run).values()) == {"changed: evaluation.sets hard"}
        assert pipeline(run) == ["validate", "evaluate", "register"]
        assert outdated(run) == {}
    do(VALIDATE, run, force=True, work=newer("eval-hard"))
    assert outdated(run) == {"evaluate": "validate was made again", "register": "evaluate is stale"}
    assert pipeline(run) == ["evaluate", "register"]


def test_prompts_that_changed_are_trained_on_though_an_evaluation_set_was_added_at_once(
    run: Path, values: Values, tmp_path: Path
) -> None:
    hard = {"name": "hard", "data": str(write_sums(tmp_path / "hard.parquet", 80, 90))}
    configure(run, {**values, "evaluation": {"sets": [hard]}})
    do(VALIDATE, run, work=newer("train"))
    assert outdated(run)["train"] == "validate was made again"


def test_held_out_prompts_that_changed_concern_a_training_that_evaluates(run: Path, values: Values) -> None:
    do(VALIDATE, run, force=True, work=newer("eval"))
    assert outdated(run) == {"evaluate": "validate was made again", "register": "evaluate is stale"}
    values["train"]["eval_steps"] = 2
    configure(run, values)
    do(VALIDATE, run, force=True)
    pipeline(run)
    do(VALIDATE, run, force=True, work=newer("eval"))
    assert outdated(run)["train"] == "validate was made again"


def test_what_is_missing_makes_stale_what_was_made_from_it(run: Path) -> None:
    TRAIN.path(run).rename(run / "elsewhere")
    assert outdated(run) == {"train": "not done yet", "evaluate": "train is missing", "register": "train is missing"}
    assert pipeline(run) == ["train", "evaluate", "register"]


@pytest.mark.parametrize("content", ["", '{"lineage_key": "ab', "null"])
def test_a_receipt_that_a_dying_machine_left_empty_is_one_that_is_missing(run: Path, content: str) -> None:
    for stage in STAGES:
        stage.receipt_path(run).write_text(content)
    assert {found.state for found in conditions(run, read_config(run)).values()} == {"missing"}
    assert CliRunner().invoke(app, ["status", "test"]).exit_code == 1
    assert pipeline(run) == [stage.name for stage in STAGES]
    assert outdated(run) == {}


def test_an_unfinished_output_whose_marker_is_empty_is_set_aside(run: Path) -> None:
    def interrupted(context: Context) -> Values:
        raise KeyboardInterrupt

    with pytest.raises(Interrupted):
        do(TRAIN, run, force=True, work=interrupted)
    (run / "training.partial" / MARKER).write_text("")
    assert do(TRAIN, run, force=True)
    assert list((run / "replaced").glob("training.partial-unknown"))


def test_a_stages_output_and_a_written_file_survive_a_power_cut(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch)
    assert do(TRAIN, run, force=True)
    assert disk.holds(TRAIN.path(run))
    write_text(run / "note", "text")
    assert disk.holds(run / "note")


def test_receipts_that_say_nothing_of_their_making_are_judged_by_their_keys(run: Path) -> None:
    for stage in STAGES:
        path = stage.receipt_path(run)
        receipt = json.loads(path.read_text())
        del receipt["made"], receipt["made_from"]
        path.write_text(json.dumps(receipt))
    assert outdated(run) == {}
    do(TRAIN, run, force=True)
    assert pipeline(run) == []


def test_a_stage_alone_refuses_outdated_input_and_says_what_to_run(run: Path, values: Values) -> None:
    values["train"]["max_steps"] = 9
    configure(run, values)
    before = (EVALUATE.receipt_path(run)).read_bytes()
    for force in (False, True):
        with pytest.raises(StageError) as error:
            do(EVALUATE, run, force)
        commands = re.findall(r"grpo stage (\w+) --run test +# stale: changed: train.max_steps", str(error.value))
        assert commands == ["plan", "train"]
    assert EVALUATE.receipt_path(run).read_bytes() == before
    PLAN.path(run).unlink()
    with pytest.raises(StageError, match=r"grpo stage plan --run test +# missing: not done yet"):
        do(TRAIN, run)


def test_whatever_is_made_again_everything_replaced_is_kept(run: Path) -> None:
    made = [TRAIN.read_receipt(run)["made"]]
    for _ in range(3):
        do(TRAIN, run, force=True)
        made.append(TRAIN.read_receipt(run)["made"])
    kept = [json.loads((path / "result.json").read_text())["made"] for path in (run / "replaced").iterdir()]
    assert sorted([*kept, made[-1]]) == sorted(made)
    assert len(set(made)) == 4


def test_a_forced_training_starts_empty_and_goes_on_from_where_it_was_interrupted(run: Path, values: Values) -> None:
    def interrupted(context: Context) -> Values:
        assert not (context.partial / "checkpoint").exists()
        (context.partial / "checkpoint").touch()
        raise KeyboardInterrupt

    def goes_on(context: Context) -> Values:
        assert (context.partial / "checkpoint").exists()
        return {}

    with pytest.raises(Interrupted):
        do(TRAIN, run, force=True, work=interrupted)
    assert outdated(run) == {}, "the finished training is good until another has taken its place"
    values["rewards"][0]["timeout"] = 7.0  # which no training depends on
    configure(run, values)
    do(VALIDATE, run)
    assert do(TRAIN, run, force=True, work=goes_on)

    with pytest.raises(Interrupted):
        do(TRAIN, run, force=True, work=interrupted)
    edited = copy.deepcopy(values)
    edited["algorithm"] = {"epsilon": 0.1}
    configure(run, edited)
    with pytest.raises(Interrupted):
        do(TRAIN, run, work=interrupted)
    assert list((run / "replaced").glob("training.partial-*/checkpoint"))


STORAGES = Path(__file__).parents[2] / "storages"


@pytest.mark.parametrize("version", sorted(path.name for path in STORAGES.iterdir() if path.is_dir()))
def test_every_stage_of_an_earlier_version_s_storage_is_up_to_date_and_skipped(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(context: Context) -> Values:
        raise AssertionError("made again")

    folder = shutil.copytree(STORAGES / version, tmp_path / "storage")
    monkeypatch.setattr("tasks.stages.run.get_run_logger", lambda: logging.getLogger("test"))  # there is no flow run
    monkeypatch.setenv("GRPO_STORAGE", str(folder))
    monkeypatch.chdir(folder)
    [run] = find_runs().values()
    found = conditions(run, read_config(run))
    assert {name: (each.state, each.reason) for name, each in found.items()} == {
        stage.name: ("up to date", "") for stage in STAGES
    }
    assert not any(do(stage, run, work=refuse) for stage in STAGES)
