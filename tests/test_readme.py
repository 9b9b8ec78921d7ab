"""README's own run: what its files and commands give before a training. `tests/e2e/test_readme.py` runs them all."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from flows.cli.main import app
from grpo_core.config.files import load_config
from tasks.validate import screen, too_few_to_promote
from tests.readme import write_own_run

RUN_BEFORE_A_TRAINING = (["rewards", "try"], ["plan"], ["rewards", "list"], ["keys"])


@pytest.fixture
def commands(tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[str]]]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    base = tmp_path / "storage" / "examples" / "arithmetic"
    base.mkdir(parents=True)
    (base / "base").symlink_to(model_folder)
    yield write_own_run(tmp_path, num_prompts=64, held_out=200)
    sys.modules.pop("my_rewards", None)


def test_readme_s_data_and_reward_keep_their_contract_and_can_be_promoted_by(commands: list[list[str]]) -> None:
    config = load_config("mine.toml")
    screened = screen(config)
    assert not screened.refused
    assert screened.report["num_prompts"] == {"train": 64, "eval": 200}
    assert too_few_to_promote(config, screened.report["num_prompts"], []) == []


def test_readme_s_commands_before_a_training_do_what_they_say(commands: list[list[str]]) -> None:
    shown = {}
    for start in RUN_BEFORE_A_TRAINING:
        [command] = [it for it in commands if it[: len(start)] == start]
        done = CliRunner(env={"COLUMNS": "200"}).invoke(app, command)
        assert done.exit_code == 0, done.output
        shown[start[-1]] = done.output
    assert "completion '42'" in shown["try"] and "completion '43'" in shown["try"]
    assert "prompts_per_generation      │ 16 " in shown["plan"] and "max_steps                   │ 60 " in shown["plan"]
    assert "numeric_match   [0 to 1]" in shown["list"]


def test_readme_s_other_commands_are_ones_that_the_command_line_takes(commands: list[list[str]]) -> None:
    others = [it for it in commands if all(it[: len(start)] != start for start in RUN_BEFORE_A_TRAINING)]
    assert [it[0] for it in others] == ["run", "run", "status", "status", "compare", "promote", "up"]
    group = typer.main.get_command(app)
    for name, *arguments in others:
        context = group.commands[name].make_context(name, arguments)  # type: ignore[attr-defined]
        if name == "run":
            names = {"mine.toml": load_config("mine.toml", context.params["overrides"]).name}
            assert names["mine.toml"] in ("mine", "faster")
