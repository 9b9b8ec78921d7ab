"""An environment of one's own, beside the configuration: its source is part of what a run depends on, and kept."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from flows.parameters.early_refusals import refuse_early
from grpo_core.config.files import load_config, parse_config
from grpo_core.environments.registry import EnvironmentsError
from grpo_core.errors import RewardError
from tasks.stages import table
from tasks.stages.lineage import lineage_inputs, lineage_keys, what_changed
from tasks.stages.run_directory import kept_rewards, open_run
from tests.conftest import config_values, write_data

MAZE = """
class Maze:
    def reset(self, **row):
        return " in a maze"
    def go(self, way: str) -> str:
        '''Goes.

        Args:
            way: Where to.
        '''
        return way
"""


@pytest.fixture
def values(tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A configuration with a class of a file beside it."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mazes.py").write_text(MAZE)
    write_data(tmp_path)
    named = {"environment_factory": "mazes:Maze", "tools": ["calculator"]}
    return {**config_values(model_folder, tmp_path), "environment": named}


def _stale(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    old, new = lineage_keys(parse_config(before)), lineage_keys(parse_config(after))
    return [stage for stage in old if old[stage] != new[stage]]


def test_a_changed_source_makes_every_stage_stale_and_is_named(values: dict[str, Any], tmp_path: Path) -> None:
    config = parse_config(values)
    before = lineage_inputs(config)
    (tmp_path / "mazes.py").write_text(MAZE + "# another\n")
    after = lineage_inputs(config)
    assert {stage: what_changed(before[stage], after[stage]) for stage in after} == {
        stage.name: ["source of mazes:Maze (environment)"] for stage in table.STAGES
    }


@pytest.mark.parametrize(
    ("section", "key", "value", "stale"),
    [
        ("environment", "max_turns", 3, "all"),
        ("environment", "environment_args", {"size": 3}, "all"),
        ("environment", "tools", [], "all"),
        ("data", "chat_template_kwargs", {"enable_thinking": False}, "all"),
        ("environment", "tool_timeout", 3.0, "validate"),  # it is rehearsed under it
        ("environment", "memory_gib", 3.0, "validate"),
        ("environment", "conversation_timeout", 3.0, "none"),
    ],
)
def test_what_conversations_follow_from_concerns_all_stages_and_a_limit_its_rehearsal(
    values: dict[str, Any], section: str, key: str, value: Any, stale: str
) -> None:
    edited = copy.deepcopy(values)
    edited[section][key] = value
    stages = [stage.name for stage in table.STAGES]
    assert _stale(values, edited) == {"all": stages, "validate": ["validate"], "none": []}[stale]


def test_without_tools_and_environment_their_keys_concern_nothing(values: dict[str, Any]) -> None:
    del values["environment"]
    assert _stale(values, {**values, "environment": {"max_turns": 3, "tool_timeout": 3.0}}) == []


@pytest.mark.slow
def test_a_run_keeps_its_environments_and_its_stages_find_them(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In another working folder, where the file itself is no longer, as on another machine."""
    monkeypatch.setenv("GRPO_STORAGE", str(tmp_path / "storage"))
    path = tmp_path / "config.toml"
    path.write_text(tomli_w.dumps(values))
    with open_run(load_config(path)) as run:
        keys = lineage_keys(load_config(run / "config.toml"))
    assert kept_rewards(run) == {"mazes.py": run / "rewards" / "mazes.py"}
    (tmp_path / "mazes.py").unlink()
    code = (
        "import sys, json; from grpo_core.config.files import load_config; config = load_config(sys.argv[1])\n"
        "from tasks.stages.lineage import lineage_keys; from grpo_core.environments.processes import Environments\n"
        "print(json.dumps([lineage_keys(config), sorted(Environments(config.environment).tools(''))]))"
    )
    command = [sys.executable, "-c", code, str(run / "config.toml")]
    done = subprocess.run(command, capture_output=True, text=True, cwd="/", check=True)
    assert json.loads(done.stdout) == [keys, ["calculator", "go"]]


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"tools": ["abacus"]}, "no built-in tool or environment is called 'abacus'; there are calculator, "),
        (
            {"environment_factory": "gone:Maze"},
            "'gone:Maze' cannot be imported: there is no module 'gone'; put gone.py",
        ),
    ],
)
def test_a_class_or_tool_that_is_not_there_is_refused_before_any_stage(
    values: dict[str, Any], keys: dict[str, Any], sentence: str
) -> None:
    values["environment"] |= keys
    with pytest.raises(EnvironmentsError) as error:
        refuse_early(parse_config(values))
    assert sentence in str(error.value)


@pytest.mark.parametrize(
    ("reward", "is_used", "sentence"),
    [
        ({}, False, "reward 'told' reads `environments`, and there are none: name a class in environment."),
        ({"isolated": True}, True, "reward 'told' reads `environments`, which cannot be sent to the process of an "),
        ({}, True, ""),
    ],
)
def test_a_reward_that_reads_environments_needs_some_and_the_training_s_process(
    values: dict[str, Any], reward: dict[str, Any], is_used: bool, sentence: str
) -> None:
    values["rewards"] = [{"function": "tests.grpo_core.environments.faulty:told", **reward}]
    values["environment"] = values["environment"] if is_used else {}
    if not sentence:
        refuse_early(parse_config(values))
        return
    with pytest.raises(RewardError) as error:
        refuse_early(parse_config(values))
    assert sentence in str(error.value)
