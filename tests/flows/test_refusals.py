"""Whatever a command cannot do, it says in one sentence, and its exit status says how far it got; and what grpo run
refuses in its first seconds: no traceback, no server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import tomli_w
import typer
from prefect.exceptions import TerminationSignal
from typer.main import get_command
from typer.testing import CliRunner

from flows.cli.main import app
from flows.cli.terminal import Commands, refusals
from flows.parameters.early_refusals import refuse_early
from flows.pipeline import pipeline
from grpo_core.config.files import parse_config, with_keys
from grpo_core.errors import ConfigError, GrpoError
from grpo_core.planning.plan import PlanError
from tasks.stages.errors import Interrupted, StageError
from tasks.stages.locks import locked
from tests.command_line import run_here
from tests.conftest import config_values, make_run, write_config
from tests.nvidia_smi import put_nvidia_smi

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
    "serve-model": ["sums@champion"],
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
def ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
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
    ready: Path, command: str
) -> None:
    arguments = [str(ready) if argument == "CONFIG" else argument for argument in ASK_MLFLOW[command]]
    done = CliRunner().invoke(app, [command, *arguments])
    assert (done.exit_code, type(done.exception)) == (2, SystemExit), done.exc_info
    assert done.stdout == ""
    [sentence] = done.stderr.splitlines()
    assert sentence.startswith("MLFLOW_TRACKING_URI contains a user, password or token")
    assert "hidden" not in sentence


@pytest.mark.slow
@pytest.mark.parametrize("command", DO_NOT)
def test_a_command_that_asks_nothing_of_mlflow_works_with_any_address(ready: Path, command: str) -> None:
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


def test_a_mistake_in_an_override_is_not_blamed_on_the_file_alone(ready: Path) -> None:
    done = CliRunner().invoke(app, ["run", str(ready), "--set", "train.max_stpes=3"])
    assert done.exit_code == 2
    assert f"{ready} --set train.max_stpes=3: not a valid" in " ".join(done.stderr.split())
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


@pytest.mark.parametrize(
    "override, storage, sentence",
    [
        (
            "rewards=[{function='judge', args={model='m', base_url='http://a', extra_body={until=2026-01-01}}}]",
            "storage",
            "reward 'judge': args.extra_body.until=2026-01-01 cannot be sent as JSON; write dates and times as text",
        ),
        ("data.train=gone.csv", "storage", "test: data.train = 'gone.csv': no such file or folder (looked in "),
        ("rollout.engine='vllm'", "[a] b", "/[a] b': vLLM takes '[', '*' and '?' in a path for a pattern"),
        ("seed=1", "a?b", "/a?b cannot hold a database, whose address would end at the '?'; set GRPO_STORAGE to "),
        ("seed=1", "config.toml", "config.toml cannot be created: File exists; set GRPO_STORAGE to a folder that you "),
    ],
)
def test_a_run_that_cannot_succeed_is_refused_by_one_sentence_before_any_server(
    config: Path, override: str, storage: str, sentence: str
) -> None:
    if "vllm" in override and find_spec("vllm") is None:
        pytest.skip("needs vllm, which is not installed")
    done = run_here("run", str(config), "--set", override, GRPO_STORAGE=str(config.parent / storage))
    said = done.stdout + done.stderr
    assert (done.returncode, said.count(sentence)) == (2, 1), said
    assert len(said.splitlines()) <= 2
    assert not (config.parent / storage).is_dir()


def test_a_link_to_nothing_is_said_to_be_one(config: Path) -> None:
    (config.parent / "link.jsonl").symlink_to("gone.jsonl")
    values = config_values(config.parent / "model", config.parent)
    values["data"]["train"] = str(config.parent / "link.jsonl")
    with pytest.raises(ConfigError, match="a pipe, a device or a link to nothing"):
        refuse_early(parse_config(values))


def test_a_configuration_that_is_no_toml_is_named_once(config: Path) -> None:
    config.write_text("name = \n")
    done = run_here("data", "check", str(config))
    assert (done.returncode, done.stderr.count(str(config))) == (2, 1), done.stderr


def test_sizes_of_a_dataset_on_a_hub_are_checked_without_loading_it(config: Path) -> None:
    values = config_values(config.parent, config.parent)
    values["data"]["train"] = "nobody/has-this"
    refuse_early(parse_config(values))
    values["train"]["per_device_train_batch_size"] = 13
    with pytest.raises(PlanError, match="every group must be whole"):
        refuse_early(parse_config(values))


def _run(config: Path) -> str:
    """One sentence, before anything is made."""
    done = run_here("run", str(config))
    assert (done.returncode, len((done.stdout + done.stderr).splitlines()) <= 2) == (2, True), done
    assert not (config.parent / "storage").exists()
    return done.stdout + done.stderr


def _form(config: Path) -> str:
    with pytest.raises(GrpoError) as refused:
        pipeline.fn.__wrapped__(config.stem, {})
    return str(refused.value)


def _deployment(config: Path) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PREFECT__RUNTIME__DEPLOYMENT__ID", "any")
        return _form(config)


DOORS: dict[str, Callable[[Path], str]] = {
    "run": _run,
    "plan": lambda config: run_here("plan", str(config)).stderr,
    "sweep": lambda config: run_here("sweep", str(config), "--seeds", "2").stderr,
    "form": _form,
    "deployment": _deployment,
}
TELLING = "def told(completions, environments, **columns): return [0.0] * len(completions)\n"
FAULTY = {  # keys to change, and what every door says
    "model": ({"model.name_or_path": "../gone"}, "model.name_or_path = '../gone': no such file or folder"),
    "data": ({"data.eval": "gone.csv"}, "data.eval = 'gone.csv': no such file or folder"),
    "sizes": ({"train.per_device_train_batch_size": 13}, "is not divisible by num_generations=4"),
    "reward": ({"rewards": [{"function": "nope"}]}, "no built-in reward is called 'nope'"),
    "argument": ({"rewards": [{"function": "length", "args": {"target": 5, "nope": 1}}]}, "takes no argument ['nope']"),
    "module": ({"rewards": [{"function": "lacking:told"}]}, "it imports 'nothing_of_this_name', which is not there"),
    "environments": ({"rewards": [{"function": "telling:told"}]}, "reads `environments`, and there are none"),
    "tool": ({"environment.tools": ["abacus"]}, "no built-in tool or environment is called 'abacus'"),
    "column": ({"data.columns": {"prompt": "gone:made"}}, "there is no module 'gone'"),
    "positions": ({"rollout.max_completion_length": 100_000}, "takes 64 tokens, prompt included"),
    "recording": (
        {"rollout.engine": "recorded", "rollout.recording": "nowhere"},
        "rollout.recording='nowhere' has no nowhere/training/completions/",
    ),
    "curriculum": (
        {"data.curriculum.kind": "variance", "rewards": [{"function": "telling:told", "name": "told"}]},
        "data.curriculum.kind='variance' goes by pass rates",
    ),
    "kubernetes": (
        {"launch.launcher": "kubernetes", "launch.kubernetes": "gone.yaml"},
        "launch.kubernetes='gone.yaml': No such file",
    ),
    "GPUs": ({"rollout.engine": "vllm-server", "rollout.vllm_num_servers": 1}, "need 2 GPUs, and this machine has 1"),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTY)
def test_a_faulty_configuration_is_refused_at_every_door_by_the_same_sentence(
    fault: str, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = config.parent
    monkeypatch.setenv("GRPO_STORAGE", str(folder / "storage"))
    monkeypatch.setenv("GRPO_CONFIGS", str(folder))
    (folder / "lacking.py").write_text("import nothing_of_this_name\n" + TELLING)
    (folder / "telling.py").write_text(TELLING)
    (folder / "model" / "config.json").write_text(json.dumps({"max_position_embeddings": 64}))
    if fault == "GPUs":
        if find_spec("vllm") is None:
            pytest.skip("needs vllm, which is not installed")
        put_nvidia_smi(folder, 1)
        monkeypatch.setenv("PATH", str(folder))
    keys, sentence = FAULTY[fault]
    config.write_text(tomli_w.dumps(with_keys(config_values(folder / "model", folder), keys)))
    said = {name: " ".join(door(config).split()) for name, door in DOORS.items()}
    assert [name for name, text in said.items() if sentence not in text] == [] and said["run"].count(sentence) == 1
    assert not (folder / "storage" / "runs").exists()


@pytest.mark.slow
def test_a_run_that_another_process_works_in_is_refused_before_any_server(config: Path) -> None:
    folder = config.parent / "storage" / "runs" / "test"
    folder.mkdir(parents=True)
    command = [sys.executable, "-m", "flows.cli.main", "run", str(config)]
    with locked(folder):
        environment = {**os.environ, "GRPO_STORAGE": str(config.parent / "storage")}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (done.returncode, str(folder) in done.stderr) == (1, True), done.stderr
    assert not [*(config.parent / "storage" / "prefect").glob("*")]
