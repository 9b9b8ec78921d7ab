"""What is up to date, and what a stage refuses to work on."""

from __future__ import annotations

import copy
import errno
import json
import logging
import os
import re
import subprocess
import sys
import uuid
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from typer.testing import CliRunner

from flows.cli.main import app
from grpo_core.config.files import dump_config, parse_config
from tasks.stages.condition import MARKER, conditions
from tasks.stages.errors import Interrupted, StageError
from tasks.stages.files import write_text
from tasks.stages.run import ERRORS, Context, run_stage
from tasks.stages.run_directory import UnknownRunError, find_run, read_config
from tasks.stages.table import EVALUATE, PLAN, REGISTER, STAGES, TRAIN, VALIDATE, Stage
from tests.conftest import config_values, with_keys, write_sums
from tests.grpo_core.training.disk import Disk

Values = dict[str, Any]


@pytest.fixture
def values(tmp_path: Path, model_folder: Path) -> Values:
    write_sums(tmp_path / "train.parquet", 10, 34)
    write_sums(tmp_path / "eval.parquet", 60, 76)
    return config_values(model_folder, tmp_path)


@pytest.fixture
def run(tmp_path: Path, values: Values, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run whose five stages are done, each by the smallest work there is."""
    monkeypatch.setenv("GRPO_STORAGE", str(tmp_path / "storage"))
    folder = tmp_path / "storage" / "runs" / "test"
    folder.mkdir(parents=True)
    _configure(folder, values)
    _pipeline(folder)
    return folder


def _configure(run: Path, values: Values) -> None:
    (run / "config.toml").write_text(dump_config(parse_config(values)))


def _validate(context: Context) -> Values:
    config = context.config
    sources = {"train": config.data.train, "eval": config.data.eval}
    sources |= {config.evaluation_files[each.name]: each.data for each in config.evaluation.sets}
    for name, source in sources.items():
        (context.partial / f"{name}.parquet").write_bytes(Path(source).read_bytes())
    return {"num_prompts": dict(zip(sources, (24, 16, 10), strict=False))}


def _newer(name: str) -> Callable[[Context], Values]:
    """The work of a validate whose source has other prompts under the same name now, as one on the hub may."""

    def validate(context: Context) -> Values:
        receipt = _validate(context)
        write_sums(context.partial / f"{name}.parquet", 10, 35)
        return receipt

    return validate


def _plan(context: Context) -> Values:
    return {"plan": {"max_steps": context.config.train.max_steps}, "forecasts": {"pace": uuid.uuid4().hex}}


def _train(context: Context) -> Values:
    return {"counted": {"updates": 4}}


def _evaluate(context: Context) -> Values:
    difference = {"mean": 0.25, "low": 0.125, "high": 0.375}
    differences = {"base": dict.fromkeys(("accuracy", "reward"), difference)}
    return {"sets": {"held-out": {"differences": differences}}, "deciding_metric": "accuracy"}


def _register(context: Context) -> Values:
    return {"model_name": "sums", "version": "7", "alias": "candidate"}


WORK: dict[str, Callable[[Context], Values]] = {
    "validate": _validate,
    "plan": _plan,
    "train": _train,
    "evaluate": _evaluate,
    "register": _register,
}


@pytest.fixture(autouse=True)
def _log_without_a_flow_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.stages.run.get_run_logger", lambda: logging.getLogger("test"))


def _do(stage: Stage, run: Path, force: bool = False, work: Callable[[Context], Values] | None = None) -> bool:
    """Run the stage; True if it was executed, False if it was skipped."""
    state = run_stage(stage, run, read_config(run), work or WORK[stage.name], force)
    if state.is_cancelled():
        raise state.data
    return state.name != "Skipped"


def _pipeline(run: Path) -> list[str]:
    """The stages that are executed when all are asked for in order."""
    return [stage.name for stage in STAGES if _do(stage, run)]


def _outdated(run: Path) -> dict[str, str]:
    return {name: found.reason for name, found in conditions(run, read_config(run)).items() if not found.is_up_to_date}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("section", "key", "value", "stale"),
    [
        ("data", "eval_split", "validation", ["validate", "plan", "train", "evaluate", "register"]),
        ("train", "max_steps", 9, ["plan", "train", "evaluate", "register"]),
        ("train", "gradient_checkpointing", True, ["plan"]),
        ("algorithm", "epsilon", 0.1, ["train", "evaluate", "register"]),
        ("evaluation", "confidence", 0.9, ["evaluate", "register"]),
        ("evaluation", "max_completion_length", 9, ["validate", "evaluate", "register"]),
        ("registry", "alias", "challenger", ["register"]),
        ("promotion", "metric", "reward", ["register"]),
        ("health", "max_kl", 3.0, []),
    ],
)
def test_an_edit_makes_stale_what_depends_on_it_and_the_pipeline_runs_just_that(
    run: Path, values: Values, section: str, key: str, value: Any, stale: list[str]
) -> None:
    values.setdefault(section, {})[key] = value
    _configure(run, values)
    assert _outdated(run) == dict.fromkeys(stale, f"changed: {section}.{key}")
    assert _pipeline(run) == stale
    assert _outdated(run) == {}


def test_a_batch_that_is_divided_otherwise_is_planned_again_and_not_trained(run: Path, values: Values) -> None:
    divided = {"per_device_train_batch_size": 4, "num_processes": 2, "sharding": "full"}
    _configure(run, with_keys(values, **divided))
    assert _pipeline(run) == ["plan"]
    _configure(run, with_keys(values, **divided, gradient_accumulation_steps=4))
    assert _pipeline(run) == ["plan", "train", "evaluate", "register"]


def test_a_limit_of_a_reward_is_validated_anew_and_trains_nothing_again(run: Path, values: Values) -> None:
    values["rewards"][0]["timeout"] = 7.0
    _configure(run, values)
    assert _outdated(run) == {"validate": "changed: rewards.0.timeout"}
    assert _pipeline(run) == ["validate"]


def test_data_and_rewards_that_changed_under_their_names_are_named(
    run: Path, values: Values, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_sums(tmp_path / "train.parquet", 11, 35)
    monkeypatch.setattr("grpo_core.fingerprint.source_of", lambda reward: b"changed")
    sources = ["source of rewards.0 (numeric_match)", "source of rewards.1 (length)"]
    assert _outdated(run)["validate"] == f"changed: data.train, {', '.join(sources)}"
    _configure(run, {**values, "seed": 1})
    assert _outdated(run)["train"] == f"changed: data.train, {', '.join(sources)} and 1 more"


def test_a_receipt_without_inputs_is_stale_and_a_copied_run_keeps_its_times(run: Path, tmp_path: Path) -> None:
    receipt = TRAIN.read_receipt(run)
    os.utime(TRAIN.receipt_path(run), (0, 0))
    runner = CliRunner(env={"COLUMNS": "200"})
    assert f"{datetime.fromtimestamp(receipt['made_at']):%Y-%m-%d}" in runner.invoke(app, ["status", "test"]).output
    assert "1970-01-01" not in runner.invoke(app, ["status", "test"]).output
    del receipt["inputs"]
    write_text(TRAIN.receipt_path(run), json.dumps({**receipt, "lineage_key": "of an older version"}))
    assert _outdated(run)["train"] == "inputs changed"


@pytest.mark.slow
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
    assert _do(stage, run, force=True)
    assert _outdated(run) == stale
    assert _pipeline(run) == list(stale)
    assert _pipeline(run) == []


def test_data_that_changed_under_its_name_on_the_hub_is_trained_on_once_it_is_validated_again(run: Path) -> None:
    _do(VALIDATE, run, force=True, work=_newer("train"))
    assert _outdated(run)["train"] == "validate was made again"


def test_an_evaluation_set_that_is_added_changed_or_removed_is_evaluated_on_and_trains_nothing_again(
    run: Path, values: Values, tmp_path: Path
) -> None:
    hard = {"name": "hard", "data": str(write_sums(tmp_path / "hard.parquet", 80, 90))}
    for sets in ([hard], [], [hard]):
        _configure(run, {**values, "evaluation": {"sets": sets}})
        assert set(_outdated(run).values()) == {"changed: evaluation.sets hard"}
        assert _pipeline(run) == ["validate", "evaluate", "register"]
        assert _outdated(run) == {}
    _do(VALIDATE, run, force=True, work=_newer("eval-hard"))
    assert _outdated(run) == {"evaluate": "validate was made again", "register": "evaluate is stale"}
    assert _pipeline(run) == ["evaluate", "register"]


def test_prompts_that_changed_are_trained_on_though_an_evaluation_set_was_added_at_once(
    run: Path, values: Values, tmp_path: Path
) -> None:
    hard = {"name": "hard", "data": str(write_sums(tmp_path / "hard.parquet", 80, 90))}
    _configure(run, {**values, "evaluation": {"sets": [hard]}})
    _do(VALIDATE, run, work=_newer("train"))
    assert _outdated(run)["train"] == "validate was made again"


def test_held_out_prompts_that_changed_concern_a_training_that_evaluates(run: Path, values: Values) -> None:
    _do(VALIDATE, run, force=True, work=_newer("eval"))
    assert _outdated(run) == {"evaluate": "validate was made again", "register": "evaluate is stale"}
    values["train"]["eval_steps"] = 2
    _configure(run, values)
    _do(VALIDATE, run, force=True)
    _pipeline(run)
    _do(VALIDATE, run, force=True, work=_newer("eval"))
    assert _outdated(run)["train"] == "validate was made again"


def test_what_is_missing_makes_stale_what_was_made_from_it(run: Path) -> None:
    TRAIN.path(run).rename(run / "elsewhere")
    assert _outdated(run) == {"train": "not done yet", "evaluate": "train is missing", "register": "train is missing"}
    assert _pipeline(run) == ["train", "evaluate", "register"]


@pytest.mark.slow
@pytest.mark.parametrize("content", ["", '{"lineage_key": "ab', "null"])
def test_a_receipt_that_a_dying_machine_left_empty_is_one_that_is_missing(run: Path, content: str) -> None:
    for stage in STAGES:
        stage.receipt_path(run).write_text(content)
    assert {found.state for found in conditions(run, read_config(run)).values()} == {"missing"}
    assert CliRunner().invoke(app, ["status", "test"]).exit_code == 1
    assert _pipeline(run) == [stage.name for stage in STAGES]
    assert _outdated(run) == {}


def test_an_unfinished_output_whose_marker_is_empty_is_set_aside(run: Path) -> None:
    def interrupted(context: Context) -> Values:
        raise KeyboardInterrupt

    with pytest.raises(Interrupted):
        _do(TRAIN, run, force=True, work=interrupted)
    (run / "training.partial" / MARKER).write_text("")
    assert _do(TRAIN, run, force=True)
    assert list((run / "replaced").glob("training.partial-unknown"))


def test_a_stages_output_and_a_written_file_survive_a_power_cut(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch)
    assert _do(TRAIN, run, force=True)
    assert disk.holds(TRAIN.path(run))
    write_text(run / "note", "text")
    assert disk.holds(run / "note")


def test_receipts_that_say_nothing_of_their_making_are_judged_by_their_keys(run: Path) -> None:
    for stage in STAGES:
        path = stage.receipt_path(run)
        receipt = json.loads(path.read_text())
        del receipt["made"], receipt["made_from"]
        path.write_text(json.dumps(receipt))
    assert _outdated(run) == {}
    _do(TRAIN, run, force=True)
    assert _pipeline(run) == []


def test_a_stage_alone_refuses_outdated_input_and_says_what_to_run(run: Path, values: Values) -> None:
    values["train"]["max_steps"] = 9
    _configure(run, values)
    before = (EVALUATE.receipt_path(run)).read_bytes()
    for force in (False, True):
        with pytest.raises(StageError) as error:
            _do(EVALUATE, run, force)
        commands = re.findall(r"grpo stage (\w+) --run test +# stale: changed: train.max_steps", str(error.value))
        assert commands == ["plan", "train"]
    assert EVALUATE.receipt_path(run).read_bytes() == before
    PLAN.path(run).unlink()
    with pytest.raises(StageError, match=r"grpo stage plan --run test +# missing: not done yet"):
        _do(TRAIN, run)


def test_whatever_is_made_again_everything_replaced_is_kept(run: Path) -> None:
    made = [TRAIN.read_receipt(run)["made"]]
    for _ in range(3):
        _do(TRAIN, run, force=True)
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
        _do(TRAIN, run, force=True, work=interrupted)
    assert _outdated(run) == {}, "the finished training is good until another has taken its place"
    values["rewards"][0]["timeout"] = 7.0  # which no training depends on
    _configure(run, values)
    _do(VALIDATE, run)
    assert _do(TRAIN, run, force=True, work=goes_on)

    with pytest.raises(Interrupted):
        _do(TRAIN, run, force=True, work=interrupted)
    edited = copy.deepcopy(values)
    edited["algorithm"] = {"epsilon": 0.1}
    _configure(run, edited)
    with pytest.raises(Interrupted):
        _do(TRAIN, run, work=interrupted)
    assert list((run / "replaced").glob("training.partial-*/checkpoint"))


def test_an_interrupted_training_says_how_much_is_saved_and_status_does_until_it_is_edited(
    run: Path, values: Values
) -> None:
    def interrupted(context: Context) -> Values:
        for name in ("step-000000", "step-000003", "step-000002", "step-000004.tmp", "step-000009.damaged"):
            (context.partial / "checkpoints" / name).mkdir(parents=True, exist_ok=True)
        raise KeyboardInterrupt

    def at_once(context: Context) -> Values:
        raise KeyboardInterrupt

    TRAIN.path(run).rename(run / "elsewhere")
    with pytest.raises(Interrupted, match=r"^train was interrupted; run the same again to go on$"):
        _do(TRAIN, run, work=at_once)
    with pytest.raises(Interrupted, match=r"^train was interrupted, 3 of 4 updates saved; run the same again"):
        _do(TRAIN, run, work=interrupted)
    shown = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["status", "test"]).output
    assert [line for line in shown.splitlines() if "train " in line and "3 of 4 updates saved" in line]
    values["algorithm"] = {"epsilon": 0.1}
    _configure(run, values)
    assert _outdated(run)["train"] == "not done yet"


def test_prompts_that_are_gone_are_missing_and_the_stage_that_reads_them_says_which_to_run(run: Path) -> None:
    (VALIDATE.path(run) / "eval.parquet").unlink()
    assert conditions(run, read_config(run))["validate"].reason == "eval.parquet is gone"
    done = CliRunner().invoke(app, ["stage", "evaluate", "--run", "test", "--force"])
    assert done.exit_code == 1
    assert done.output.count("grpo stage validate --run test    # missing: eval.parquet is gone") == 1
    assert not (run.parents[1] / "prefect").exists(), "a server was started"
    assert _pipeline(run) == ["validate"]


def test_storage_or_mlflow_that_fails_a_stage_is_a_sentence_and_its_traceback_is_in_the_runs_directory(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(context: Context) -> Values:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/here/model.safetensors")

    def untracked(context: Context) -> Values:
        MlflowClient("http://127.0.0.1:1").get_run("any")
        return {}

    def broken(context: Context) -> Values:
        return {}["figures"]

    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    sentence = "^train: No space left on device: /here/model.safetensors; see to that, then run the same again$"
    with pytest.raises(StageError, match=sentence):
        _do(TRAIN, run, force=True, work=full)
    with pytest.raises(StageError, match=r"does not answer \(Connection refused\): start the server, then run"):
        _do(EVALUATE, run, force=True, work=untracked)
    with pytest.raises(KeyError):
        _do(EVALUATE, run, force=True, work=broken)
    noted = (run / ERRORS).read_text()
    assert noted.count("Traceback (most recent call last):\n  File") >= 3
    assert noted.rstrip().endswith("KeyError: 'figures'")


def test_status_shows_each_stage_and_its_exit_status_says_whether_anything_is_to_be_done(
    run: Path, values: Values
) -> None:
    runner = CliRunner(env={"COLUMNS": "200"})
    done = runner.invoke(app, ["status", "test"])
    assert done.exit_code == 0, done.output
    for figure in (
        "24 + 16 prompts",
        "4 updates planned",
        "accuracy +25.0 points [12.5, 37.5]",
        "sums version 7 ",
    ):
        assert figure in done.output
    _configure(run, {**values, "promotion": {"metric": "reward"}})
    assert "reward +0.250 [0.125, 0.375]" in runner.invoke(app, ["status", "test"]).output
    _configure(run, {**values, "seed": 1})
    EVALUATE.path(run).rename(run / "elsewhere")
    stale = runner.invoke(app, ["status", "test"])
    assert stale.exit_code == 1
    assert re.search(r"train +│ stale +│ changed: seed", stale.output)
    assert re.search(r"evaluate +│ missing +│ not done yet", stale.output)
    assert runner.invoke(app, ["status", "tset"]).exit_code == 2


@pytest.mark.slow
def test_status_imports_neither_torch_nor_prefect_nor_mlflow(run: Path) -> None:
    code = (
        "import sys; from flows.cli.main import app; app(['status', 'test'], standalone_mode=False);"
        "print('loaded', {'torch', 'prefect', 'mlflow', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "loaded set()" in done.stdout, done.stdout + done.stderr


def test_an_unknown_run_is_refused_with_the_nearest_names_and_the_place(run: Path) -> None:
    with pytest.raises(UnknownRunError, match=f"no run 'tset' in {re.escape(str(run.parent))}.*nearest there: test"):
        find_run("tset")
    with pytest.raises(UnknownRunError):
        find_run("../runs/test")
