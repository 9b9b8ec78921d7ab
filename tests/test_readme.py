"""The first pages: the command line takes their commands, and the first run's files and commands give what is said of
them before a training. `tests/e2e/test_pages.py` runs the first run to its end."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from examples import tiny
from flows.cli.main import app
from grpo_core.config.files import load_config
from tasks.validate import too_few_to_promote
from tests.readme import ENVIRONMENTS, FIRST_RUN, PAGES, ROOT, commands_of, write_files
from tests.rows import screen


@pytest.fixture
def first_run(tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    base = tmp_path / "storage" / "examples" / "arithmetic"
    base.mkdir(parents=True)
    (base / "base").symlink_to(model_folder)
    write_files(FIRST_RUN, tmp_path)
    subprocess.run([sys.executable, "make_sums.py"], check=True)
    yield
    sys.modules.pop("my_rewards", None)


@pytest.mark.slow
@pytest.mark.usefixtures("first_run")
def test_the_first_runs_data_and_reward_keep_their_contract_and_can_be_promoted_by() -> None:
    config = load_config("mine.toml")
    screened = screen(config)
    assert not screened.refused
    assert screened.report["num_prompts"] == {"train": 400, "eval": 300}
    assert too_few_to_promote(config, "reward", {"held-out": 300}) == []


@pytest.mark.slow
@pytest.mark.usefixtures("first_run")
def test_the_first_runs_commands_before_a_training_do_what_the_page_says() -> None:
    shown = {}
    for command in commands_of(FIRST_RUN):
        if command[:3] == ["grpo", "rewards", "try"] or command[:2] == ["grpo", "plan"]:
            done = CliRunner(env={"COLUMNS": "200"}).invoke(app, command[1:])
            assert done.exit_code == 0, done.output
            shown[command[1]] = done.output
    right, wrong = shown["rewards"].split("completion '84'")
    assert "completion '85'" in right and "│ near   │ 1 " in right and "│ near   │ 0.5 " in wrong
    assert "prompts_per_generation      │ 16 " in shown["plan"] and "max_steps                   │ 60 " in shown["plan"]


@pytest.mark.slow
def test_the_environment_of_its_page_is_tried_as_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    said = [tiny.call("calculator", expression="909*877"), tiny.answer("797193"), tiny.say("797193")]
    tokenizer = tiny.make_tokenizer([("909*877", said)] * 2)
    base = tmp_path / "storage" / "examples" / "calculator" / "base"
    tokenizer.save_pretrained(base)
    tiny.make_model(tokenizer, context=512).config.save_pretrained(base)
    write_files(ENVIRONMENTS, tmp_path)
    subprocess.run([sys.executable, "make_orders.py"], check=True)
    (tried,) = (command for command in commands_of(ENVIRONMENTS) if command[:3] == ["grpo", "env", "try"])
    done = CliRunner(env={"COLUMNS": "200"}).invoke(app, tried[1:])
    assert done.exit_code == 0, done.output
    assert "ended: the policy called no tool" in done.output
    assert re.search(r"environment +│ 0\.5 ", done.output) and re.search(r"numeric_match +│ 1 ", done.output)


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}/{page.name}")
def test_the_first_pages_commands_are_ones_that_the_command_line_takes(page: Path) -> None:
    typed = [words[1:] for words in commands_of(page) if words[0] == "grpo"]
    assert typed
    for arguments in typed:
        command = typer.main.get_command(app)
        while hasattr(command, "commands"):
            command, arguments = command.commands[arguments[0]], arguments[1:]
        given = command.make_context(command.name, arguments).params
        if command.name == "run" and (ROOT / given["config"]).exists():
            load_config(ROOT / given["config"], given["overrides"])
