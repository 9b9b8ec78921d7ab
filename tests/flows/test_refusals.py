"""Whatever a command cannot do, it says in one sentence, and its exit status says how far it got."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from prefect.exceptions import TerminationSignal
from typer.main import get_command
from typer.testing import CliRunner

from flows.cli.main import app
from flows.cli.terminal import Commands, refusals
from grpo_core.errors import ConfigError, GrpoError
from tasks.stages.errors import Interrupted, StageError
from tests.conftest import config_values, make_run, write_config

ASK_MLFLOW = {
    "run": ["CONFIG"],
    "sweep": ["CONFIG", "--seeds", "2"],
    "stage": ["validate", "--run", "test"],
    "plan": ["CONFIG", "--history"],
    "compare": ["a" * 32, "sums@champion"],
    "promote": ["sums"],
    "rollback": ["sums"],
    "clean": [],
    "schedule": ["CONFIG", "--cron", "0 2 * * *"],
    "up": [],
    "serve": [],
    "worker": ["cpu"],
}
DO_NOT = {
    "init": ["fresh", "--recipe", "smallest"],
    "status": [],
    "keys": [],
    "rewards": ["list"],
    "env": ["try", "--help"],
    "rollouts": ["--help"],
    "data": ["check", "--help"],
}


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration that could be run, the run `test`, and an address of MLflow that contains a password."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GRPO_STORAGE", str(tmp_path / "storage"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://grpo:hidden@mlflow.internal")
    make_run(tmp_path / "storage" / "runs" / "test", config_values(tmp_path / "model", tmp_path))
    return write_config(tmp_path, changes={"name": "new"})


def test_every_command_is_among_those_tried_below() -> None:
    assert get_command(app).commands.keys() == {*ASK_MLFLOW, *DO_NOT}


@pytest.mark.slow
@pytest.mark.parametrize("command", ASK_MLFLOW)
def test_a_password_in_the_address_of_mlflow_is_refused_in_one_sentence_without_saying_it(
    config: Path, command: str
) -> None:
    arguments = [str(config) if argument == "CONFIG" else argument for argument in ASK_MLFLOW[command]]
    done = CliRunner().invoke(app, [command, *arguments])
    assert (done.exit_code, type(done.exception)) == (2, SystemExit), done.exc_info
    assert done.stdout == ""
    [sentence] = done.stderr.splitlines()
    assert sentence.startswith("MLFLOW_TRACKING_URI contains a user, password or token")
    assert "hidden" not in sentence


@pytest.mark.slow
@pytest.mark.parametrize("command", DO_NOT)
def test_a_command_that_asks_nothing_of_mlflow_works_with_any_address(config: Path, command: str) -> None:
    done = CliRunner().invoke(app, [command, *DO_NOT[command]])
    assert (done.exit_code, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ConfigError("so it is"), 2),
        (StageError("so it is"), 1),
        (Interrupted("so it is", KeyboardInterrupt()), 130),
        (Interrupted("so it is", TerminationSignal(15)), 143),
        (GrpoError("so it is"), 2),
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("about", ["", "test"])
def test_an_error_for_a_person_ends_any_command_with_its_sentence_and_its_status(
    error: GrpoError, status: int, about: str
) -> None:
    broken = typer.Typer(cls=Commands)

    @broken.command()
    def first() -> None:
        if about:
            with refusals(about):
                raise error
        raise error

    @broken.command()
    def second() -> None:
        """Without it there would be no group of commands."""

    done = CliRunner().invoke(broken, ["first"])
    assert (done.exit_code, done.stderr) == (status, f"{about}: {error}\n" if about else f"{error}\n")


def test_a_mistake_in_an_override_is_not_blamed_on_the_file_alone(config: Path) -> None:
    done = CliRunner().invoke(app, ["run", str(config), "--set", "train.max_stpes=3"])
    assert done.exit_code == 2
    assert f"{config} --set train.max_stpes=3: not a valid" in " ".join(done.stderr.split())
    assert "did you mean 'max_steps'?" in done.stderr


@pytest.mark.parametrize(
    ("started", "error", "status"), [(False, ConfigError, 2), (True, ConfigError, 1), (True, StageError, 1)]
)
def test_a_refusal_after_the_work_was_started_is_a_failure(started: bool, error: type[GrpoError], status: int) -> None:
    with pytest.raises(GrpoError, match=r"^test: so it is$") as raised, refusals("test", started):
        raise error("so it is")
    assert raised.value.exit_status == status


def test_an_error_for_no_person_keeps_its_traceback() -> None:
    broken = typer.Typer(cls=Commands)
    broken.command("first")(lambda: {}["figures"])
    broken.command("second")(lambda: None)
    assert isinstance(CliRunner().invoke(broken, ["first"]).exception, KeyError)
