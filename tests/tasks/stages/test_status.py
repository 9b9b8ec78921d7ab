"""What a person is told of a run: by a stage that ended, by grpo status, and of a request to Prefect's server that
failed."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from mlflow import MlflowClient
from prefect.client.orchestration import SyncPrefectClient
from prefect.settings import PREFECT_API_URL, temporary_settings
from typer.testing import CliRunner

from flows.cli import status
from flows.cli.main import app
from grpo_core.config.files import parse_config
from tasks.stages.condition import Condition, conditions, refuse_outdated_inputs
from tasks.stages.errors import Interrupted, StageError
from tasks.stages.prefect_address import describe_server_failure
from tasks.stages.run import ERRORS, Context
from tasks.stages.run_directory import UnknownRunError, find_run, read_config
from tasks.stages.table import EVALUATE, STAGES, TRAIN, VALIDATE, Stage
from tests.conftest import config_values
from tests.serving import free_ports
from tests.tasks.stages.small_stages import Values, configure, do, outdated, pipeline


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
    with pytest.raises(Interrupted, match=r"^train was interrupted; run the same again to continue$"):
        do(TRAIN, run, work=at_once)
    with pytest.raises(Interrupted, match=r"^train was interrupted, 3 of 4 updates saved; run the same again"):
        do(TRAIN, run, work=interrupted)
    shown = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["status", "test"]).output
    assert [line for line in shown.splitlines() if "train " in line and "3 of 4 updates saved" in line]
    values["algorithm"] = {"epsilon": 0.1}
    configure(run, values)
    assert outdated(run)["train"] == "not done yet"


def test_a_stage_that_is_up_to_date_needs_its_inputs_up_to_date_only_if_it_is_made_again(tmp_path: Path) -> None:
    config = parse_config(config_values(tmp_path, tmp_path))
    now = {stage.name: Condition("up to date") for stage in STAGES} | {"validate": Condition("missing", "it is gone")}
    refuse_outdated_inputs(EVALUATE, tmp_path, config, now)
    with pytest.raises(StageError, match=r"grpo stage validate .*# missing: it is gone"):
        refuse_outdated_inputs(EVALUATE, tmp_path, config, now, force=True)


def test_prompts_that_are_gone_are_missing_and_the_stage_that_reads_them_says_which_to_run(run: Path) -> None:
    (VALIDATE.path(run) / "eval.parquet").unlink()
    assert conditions(run, read_config(run))["validate"].reason == "eval.parquet is gone"
    done = CliRunner().invoke(app, ["stage", "evaluate", "--run", "test", "--force"])
    assert done.exit_code == 1
    assert done.output.count("grpo stage validate --run test    # missing: eval.parquet is gone") == 1
    assert not (run.parents[1] / "prefect").exists(), "a server was started"
    assert pipeline(run) == ["validate"]


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
    sentence = "^train: No space left on device: /here/model.safetensors; solve that, then run the same again$"
    with pytest.raises(StageError, match=sentence):
        do(TRAIN, run, force=True, work=full)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    with pytest.raises(StageError, match=r"does not answer \(Connection refused\): start the server, then run"):
        do(EVALUATE, run, force=True, work=untracked)
    with pytest.raises(KeyError):
        do(EVALUATE, run, force=True, work=broken)
    noted = (run / ERRORS).read_text()
    assert noted.count("Traceback (most recent call last):\n  File") >= 3
    assert noted.rstrip().endswith("KeyError: 'figures'")


def test_status_shows_each_stage_and_its_exit_status_says_whether_anything_is_to_be_done(
    run: Path, values: Values
) -> None:
    runner = CliRunner(env={"COLUMNS": "200"})
    done = runner.invoke(app, ["status", "test"])
    assert done.exit_code == 0, done.output
    for figure in ("24 + 16 prompts", "4 updates planned", "accuracy +25.0 points [12.5, 37.5]", "sums version 7 "):
        assert figure in done.output
    configure(run, {**values, "promotion": {"metric": "reward"}})
    assert "reward +0.250 [0.125, 0.375]" in runner.invoke(app, ["status", "test"]).output
    configure(run, {**values, "seed": 1})
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
    (run.parents[1] / "config.toml").write_text("")
    for name in ("../runs/test", "..", ".", "", str(run)):
        with pytest.raises(UnknownRunError):
            find_run(name)


def test_of_many_runs_the_newest_are_listed_and_only_their_files_are_read(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(status.LISTED + 20):
        other = run.with_name(f"other-{number:03}")
        other.mkdir()
        (other / "config.toml").write_text("name = 1")
        (other / "plan.json").write_text("{}")
        for file in other.iterdir():
            os.utime(file, (number, number))
    read = set[Path]()
    plain = Stage.read_receipt
    monkeypatch.setattr(Stage, "read_receipt", lambda stage, run: read.add(run) or plain(stage, run))
    done = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["status"])
    shown = re.findall(r"(test|other-\d+) ", done.output)
    assert shown == ["test", *(f"other-{number:03}" for number in reversed(range(21, status.LISTED + 20)))]
    assert "and 21 whose files are older" in done.output
    assert {folder.name for folder in read} == {*shown}


@pytest.mark.slow
def test_a_server_that_does_not_answer_is_named_with_the_reason_whatever_wraps_it() -> None:
    url = f"http://127.0.0.1:{free_ports(1)[0]}/api"
    with (
        temporary_settings({PREFECT_API_URL: url}),
        pytest.raises(RuntimeError) as error,
        SyncPrefectClient(url) as client,
    ):
        try:
            client.read_flow_runs()
        except Exception as cause:
            raise RuntimeError("no slot could be taken") from cause
    with temporary_settings({PREFECT_API_URL: url}):
        said = describe_server_failure(error.value)
    assert said.startswith(f"Prefect's server at {url} does not answer (Connection refused): ")


def test_a_request_to_another_server_is_not_taken_for_one() -> None:
    request = httpx.Request("GET", "https://huggingface.co/api/models")
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:4200/api"}):
        assert describe_server_failure(httpx.ConnectError("no route to host", request=request)) == ""
        assert describe_server_failure(ValueError("wrong")) == ""
