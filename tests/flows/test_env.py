"""`grpo env try`, as a person asks it: a conversation whose turns are typed, or come from a script."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import tomli_w
from typer.testing import CliRunner

from flows.cli.env import read_turn
from flows.cli.main import app
from grpo_core.environments.calls import ToolCall
from grpo_core.errors import ConfigError
from tests.grpo_core.environments import scripted

pytestmark = pytest.mark.served

PLAYING = "tests.grpo_core.environments.playing"
ADD = {"function": {"parameters": {"properties": {"number": {"type": "integer"}, "text": {"type": "string"}}}}}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Three rows; the environment begins at a number that follows from the row's."""
    rows = [{"prompt": [{"role": "user", "content": "Count"}], "answer": str(n)} for n in (864, 7, 8)]
    pl.DataFrame(rows).write_parquet(tmp_path / "train.parquet")
    values: dict[str, Any] = {
        "name": "counting",
        "model": {"name_or_path": str(scripted.save_model(tmp_path / "model"))},
        "data": {name: str(tmp_path / "train.parquet") for name in ("train", "eval")},
        "rewards": [{"function": "environment"}, {"function": "numeric_match", "weight": 0.5}],
        "environment": {"environment_factory": f"{PLAYING}:Counting", "tools": ["calculator"], "max_turns": 3},
        "rollout": {"max_completion_length": 300},
    }
    (tmp_path / "config.toml").write_text(tomli_w.dumps(values))
    return tmp_path / "config.toml"


def _grpo(*arguments: Any, typed: str = "", status: int = 0) -> str:
    done = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["env", "try", *map(str, arguments)], input=typed)
    assert done.exit_code == status, done.output
    return done.output


def _blocks(output: str) -> list[tuple[str, int, str, str]]:
    """Who speaks, how many tokens, what is said of them, and the text."""
    found = re.findall(r"^(\w+): (\d+) tokens, (.*)\n(?s:(.*?))\n\n", output, re.MULTILINE)
    return [(who, int(tokens), note, text) for who, tokens, note, text in found]


def test_a_script_shows_what_the_model_would_see_what_is_trained_and_what_it_earns(config: Path) -> None:
    script = config.with_name("script")
    script.write_text("add(6)\nadd(-6)\nIt is 864.\n")
    output = _grpo(config, "--script", script)
    add = '<tool_call>\n{{"name": "add", "arguments": {{"number": {}}}}}\n</tool_call><|im_end|>'
    answer = "<|im_start|>tool\nnow {}<|im_end|>\n<|im_start|>assistant"
    blocks = _blocks(output)
    assert [(who, text) for who, _, _, text in blocks] == [
        ("prompt", "<|im_start|>user\nCount from 864<|im_end|>\n<|im_start|>assistant"),
        ("policy", add.format(6)),
        ("environment", answer.format(870)),
        ("policy", add.format(-6)),
        ("environment", answer.format(864)),
        ("policy", "It is 864.<|im_end|>"),
    ]
    left = 300 - len(" from 864")
    for who, tokens, note, _ in blocks[1:]:
        left -= tokens
        assert note == ("not trained" if who == "environment" else f"trained; {left} are left")
    assert "ended: the policy called no tool" in output and "answer: '864'" in output
    adds = [[cell.strip() for cell in line.split("│")[1:6]] for line in output.splitlines() if line[:1] == "│"]
    assert adds == [
        ["environment", "1", "1", "1", "1"],
        ["numeric_match", "1", "1", "0.5", "0.5"],
        ["reward", "", "", "", "1.5"],
    ]


def test_a_person_who_mistypes_a_call_is_asked_again(config: Path) -> None:
    output = _grpo(config, "--row", 1, typed="add(3*4)\n" + "add(12)\n" * 3)
    assert "Call a tool as calculator(expression=…)" in output
    assert "add(3*4): arguments are written as in Python, texts in quotes: add(number=…)" in output
    assert [who for who, _, _, _ in _blocks(output)] == ["prompt", *["policy", "environment"] * 2, "policy"]
    assert "ended: environment.max_turns = 3; the last calls were not made" in output


def test_the_limit_of_calls_is_named_as_the_end(config: Path) -> None:
    output = _grpo(config, "--set", "environment.max_tool_calls=1", typed="add(12)\n")
    assert [who for who, _, _, _ in _blocks(output)] == ["prompt", "policy"]
    assert "ended: environment.max_tool_calls = 1\n" in output


def test_an_environment_that_is_lost_ends_the_command_as_a_failure(config: Path) -> None:
    said = _grpo(config, typed="die()\n", status=1)
    assert "the environment failed: tool die: its process ended; in training, this conversation would have no" in said


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            ["--set", "rewards=[{function='numeric_match'}]", "--set", "environment={}"],
            "names neither a class (environment_factory) nor tools",
        ),
        (["--row", "3"], "--row 3: data.train has 3 rows, counted from 0"),
        (["--set", "data.columns.prompt=answer"], "tools and environments need messages"),
        (["--script", "gone"], "--script gone: cannot be read: "),
    ],
)
def test_what_cannot_be_tried_is_refused(config: Path, options: list[str], sentence: str) -> None:
    assert sentence in _grpo(config, *options, status=2)


def test_a_completion_without_a_conversation_is_no_case_for_a_reward_that_reads_environments(config: Path) -> None:
    done = CliRunner().invoke(app, ["rewards", "try", str(config), "--completion", "864"])
    assert done.exit_code == 2
    assert "reward 'environment' reads `environments`: hold a conversation with `grpo env try` instead" in done.output


@pytest.mark.parametrize(
    ("line", "turn"),
    [
        ("add(1, text='a')", [ToolCall("add", {"number": 1, "text": "a"})]),
        ("other(1)", [ToolCall("other", {"argument0": 1})]),
        ("other(a=[1])", [ToolCall("other", {"a": [1]})]),
        ('{"name": "add", "arguments": {"number": 2}}', [ToolCall("add", {"number": 2})]),
        ('[{"name": "add"}, {"name": "add"}]', [ToolCall("add"), ToolCall("add")]),
        ("add(3, 'x', 5)", None),
        ("add(x)", None),
        ('{"name": "add"', None),
        ("f(x)", "f(x)"),
        ("[4]", "[4]"),
        ('"add(1)\\n2"', "add(1)\n2"),
        ("", ""),
    ],
)
def test_a_line_is_a_call_or_what_the_policy_says(line: str, turn: Any) -> None:
    if turn is None:
        with pytest.raises(ConfigError):
            read_turn(line, {"add": ADD})
    else:
        assert read_turn(line, {"add": ADD}) == turn
