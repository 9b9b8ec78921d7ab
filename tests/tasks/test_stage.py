"""What is up to date, what a stage refuses to work on, and that a run directory has one writer."""

from __future__ import annotations

import copy
import json
import logging
import os
import re
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from flows.cli import app
from grpo_core.config import dump_config, load_config, parse_config
from tasks import storage
from tasks.stage import (
    EVALUATE,
    PLAN,
    REGISTER,
    STAGES,
    TRAIN,
    VALIDATE,
    Context,
    Stage,
    StageError,
    conditions,
    run_stage,
)
from tasks.storage import RunInUseError, UnknownRunError, find_run, locked
from tests.conftest import config_values, write_sums

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
    for name in ("train", "eval"):
        source = Path(getattr(context.config.data, name))
        (context.partial / f"{name}.parquet").write_bytes(source.read_bytes())
    return {"num_prompts": {"train": 24, "eval": 16}}


def _plan(context: Context) -> Values:
    return {"plan": {"max_steps": context.config.train.max_steps}, "forecasts": {"pace": uuid.uuid4().hex}}


def _train(context: Context) -> Values:
    return {"counted": {"updates": 4}}


def _evaluate(context: Context) -> Values:
    accuracy = {"mean": 0.25, "low": 0.125, "high": 0.375}
    return {"sets": {"held-out": {"differences": {"base": {"accuracy": accuracy}}}}}


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
    monkeypatch.setattr("prefect.get_run_logger", lambda: logging.getLogger("test"))


def _do(stage: Stage, run: Path, force: bool = False, work: Callable[[Context], Values] | None = None) -> bool:
    """Whether it was executed rather than skipped."""
    return run_stage(stage, run, work or WORK[stage.name], force).name != "Skipped"


def _pipeline(run: Path) -> list[str]:
    """The stages that are executed when all are asked for in order."""
    return [stage.name for stage in STAGES if _do(stage, run)]


def _outdated(run: Path) -> dict[str, str]:
    return {name: found.reason for name, found in conditions(run).items() if not found.is_up_to_date}


CHANGED = "configuration or inputs changed"


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
        ("health", "max_kl", 3.0, []),
    ],
)
def test_an_edit_makes_stale_what_depends_on_it_and_the_pipeline_runs_just_that(
    run: Path, values: Values, section: str, key: str, value: Any, stale: list[str]
) -> None:
    values.setdefault(section, {})[key] = value
    _configure(run, values)
    assert _outdated(run) == dict.fromkeys(stale, CHANGED)
    assert _pipeline(run) == stale
    assert _outdated(run) == {}


def test_a_limit_of_a_reward_is_validated_anew_and_trains_nothing_again(run: Path, values: Values) -> None:
    values["rewards"][0]["timeout"] = 7.0
    _configure(run, values)
    assert _pipeline(run) == ["validate"]


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
    def validate_newer(context: Context) -> Values:
        receipt = _validate(context)
        write_sums(context.partial / "train.parquet", 10, 35)
        return receipt

    _do(VALIDATE, run, force=True, work=validate_newer)
    assert _outdated(run)["train"] == "validate was made again"


def test_what_is_missing_makes_stale_what_was_made_from_it(run: Path) -> None:
    TRAIN.path(run).rename(run / "elsewhere")
    assert _outdated(run) == {"train": "not done yet", "evaluate": "train is missing", "register": "train is missing"}
    assert _pipeline(run) == ["train", "evaluate", "register"]


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
        commands = re.findall(
            r"grpo stage (\w+) --run test +# stale: configuration or inputs changed", str(error.value)
        )
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

    with pytest.raises(KeyboardInterrupt):
        _do(TRAIN, run, force=True, work=interrupted)
    assert _outdated(run) == {}, "the finished training is good until another has taken its place"
    values["rewards"][0]["timeout"] = 7.0  # which no training depends on
    _configure(run, values)
    _do(VALIDATE, run)
    assert _do(TRAIN, run, force=True, work=goes_on)

    with pytest.raises(KeyboardInterrupt):
        _do(TRAIN, run, force=True, work=interrupted)
    edited = copy.deepcopy(values)
    edited["algorithm"] = {"epsilon": 0.1}
    _configure(run, edited)
    with pytest.raises(KeyboardInterrupt):
        _do(TRAIN, run, work=interrupted)
    assert list((run / "replaced").glob("training.partial-*/checkpoint"))


def test_status_shows_each_stage_and_its_exit_status_says_whether_anything_is_to_be_done(
    run: Path, values: Values
) -> None:
    runner = CliRunner(env={"COLUMNS": "200"})
    done = runner.invoke(app, ["status", "test"])
    assert done.exit_code == 0, done.output
    for figure in ("24 + 16 prompts", "4 updates planned", "+25.0% [+12.5%, +37.5%]", "sums version 7, candidate"):
        assert figure in done.output
    _configure(run, {**values, "seed": 1})
    EVALUATE.path(run).rename(run / "elsewhere")
    stale = runner.invoke(app, ["status", "test"])
    assert stale.exit_code == 1
    assert re.search(r"train +│ stale +│ configuration or inputs changed", stale.output)
    assert re.search(r"evaluate +│ missing +│ not done yet", stale.output)
    assert runner.invoke(app, ["status", "tset"]).exit_code == 2


def test_status_imports_neither_torch_nor_prefect_nor_mlflow(run: Path) -> None:
    code = (
        "import sys; from flows.cli import app; app(['status', 'test'], standalone_mode=False);"
        "print('loaded', {'torch', 'prefect', 'mlflow', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "loaded set()" in done.stdout, done.stdout + done.stderr


def test_an_unknown_run_is_refused_with_the_nearest_names_and_the_place(run: Path) -> None:
    with pytest.raises(UnknownRunError, match=f"no run 'tset' in {re.escape(str(run.parent))}.*nearest there: test"):
        find_run("tset")
    with pytest.raises(UnknownRunError):
        find_run("../runs/test")


HOLD = """
import sys
from pathlib import Path
from tasks.storage import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""

# Supervises a process that lets SIGTERM pass until it is told through a file that it may end.
HOLD_AND_SUPERVISE = """
import sys
from pathlib import Path
from tasks.process import run_process
from tasks.storage import locked
STUBBORN = '''
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(os.getpid(), flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.05)
'''
with locked(Path(sys.argv[1])):
    run_process(["-c", STUBBORN, sys.argv[2]], lambda line: print(line, flush=True), grace=60)
"""


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start Python code; its first line is read. What is left of it is killed in the end."""
    started: list[subprocess.Popen[str]] = []

    def _start(code: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield _start
    for process in started:
        process.kill()
        process.wait()


def test_a_second_process_is_refused_at_once_with_who_holds_the_run(run: Path, start: Any) -> None:
    holder = start(HOLD, str(run))
    assert holder.stdout.readline() == "held\n"
    refusal = rf"run 'test' is in use by process {holder.pid} on .* since 20.*cancel it"
    with pytest.raises(RunInUseError, match=refusal), locked(run, say=pytest.fail):
        raise AssertionError("two writers")
    holder.stdin.close()
    holder.wait(timeout=20)
    with locked(run):
        pass


def test_a_run_that_is_in_use_keeps_its_configuration(run: Path, values: Values, start: Any) -> None:
    holder = start(HOLD, str(run))
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(RunInUseError), storage.open_run(parse_config({**values, "seed": 1})):
        raise AssertionError("two writers")
    assert load_config(run / "config.toml").seed == 0


def test_a_run_is_free_once_its_holder_was_killed(run: Path, start: Any) -> None:
    holder = start(HOLD, str(run))
    assert holder.stdout.readline() == "held\n"
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with locked(run, say=pytest.fail):
        pass


def test_a_run_stays_locked_while_what_a_killed_holder_supervised_is_ending_and_is_waited_for(
    run: Path, start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end = tmp_path / "may-end"
    holder = start(HOLD_AND_SUPERVISE, str(run), str(may_end))
    child = psutil.Process(int(holder.stdout.readline()))
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    monkeypatch.setattr(storage, "ENDING_SECONDS", 0.3)
    with pytest.raises(RunInUseError, match=f"process {holder.pid}"), locked(run):
        raise AssertionError("two writers")
    assert child.is_running()

    monkeypatch.setattr(storage, "ENDING_SECONDS", 60.0)
    told: list[str] = []
    with locked(run, say=lambda line: (told.append(line), may_end.touch())):
        assert not psutil.pid_exists(child.pid) or child.status() == psutil.STATUS_ZOMBIE
    assert len(told) == 1
    assert "waiting up to 60 s" in told[0]


def test_a_retry_waits_for_the_attempt_before_it_and_another_flow_run_does_not(
    run: Path, start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = start(HOLD, str(run), PREFECT__FLOW_RUN_ID="one")
    assert attempt.stdout.readline() == "held\n"
    monkeypatch.setenv("PREFECT__FLOW_RUN_ID", "two")
    with pytest.raises(RunInUseError), locked(run, say=pytest.fail):
        raise AssertionError("two writers")
    monkeypatch.setenv("PREFECT__FLOW_RUN_ID", "one")
    with locked(run, say=lambda line: attempt.stdin.close()):
        assert attempt.wait(timeout=20) == 0
