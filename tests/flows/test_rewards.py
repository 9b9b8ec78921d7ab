"""`grpo rewards`, as a person asks it: what there is, and what a configuration makes of a completion."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import tomli_w
from typer.testing import CliRunner

from flows.cli.main import app
from grpo_core.rewards.registry import BUILTIN
from tests.conftest import config_values, write_sums


def _grpo(*arguments: str, status: int = 0, width: int = 240) -> str:
    done = CliRunner(env={"COLUMNS": f"{width}"}).invoke(app, ["rewards", *arguments])
    assert done.exit_code == status, done.output
    return done.output


def _cells(output: str) -> list[list[str]]:
    """The rows of all tables, without the empty ones."""
    rows = [re.split("[│┃]", line)[1:-1] for line in output.splitlines() if line[:1] in ("│", "┃")]
    return [[cell.strip() for cell in row] for row in rows]


@pytest.fixture
def config(tmp_path: Path, model_folder: Path) -> Path:
    write_sums(tmp_path / "train.parquet", 10, 34)
    values = config_values(model_folder, tmp_path)
    values["rewards"] = [
        {"function": "format_regex", "name": "form", "weight": 0.2, "args": {"pattern": "[0-9]+"}},
        {"function": "numeric_match", "gate": "form"},
        {"function": "length", "args": {"target": 3}, "weight": -2.0, "clip": [0.5, 0.75], "normalize": True},
    ]
    path = tmp_path / "config.toml"
    path.write_text(tomli_w.dumps(values))
    return path


def test_every_built_in_reward_is_listed_with_its_range_columns_and_arguments() -> None:
    entries = re.split(r"^(?=\w)", _grpo("list"), flags=re.MULTILINE)[1:]
    listed = {entry.split()[0]: [line.strip() for line in entry.splitlines()] for entry in entries}
    assert listed.keys() == BUILTIN.keys()
    head, _, *rest = listed["numeric_match"]
    assert (head, rest) == ("numeric_match   [0 to 1]", ["columns: answer", "arguments: tolerance = 0.0"])
    assert listed["format_regex"][2:] == ["arguments: pattern"]
    assert listed["soft_overlong_punishment"][0] == "soft_overlong_punishment   [-1 to 0]"
    assert listed["exact_match"][1].startswith("1 if the completion is the answer")


def test_names_of_rewards_and_arguments_are_whole_in_a_narrow_terminal() -> None:
    narrow = _grpo("list", width=80)
    assert max(map(len, narrow.splitlines())) <= 80
    assert narrow.split() == _grpo("list", width=1000).split()


def test_a_completion_is_shown_reward_by_reward_and_summed(config: Path) -> None:
    """11+4=15: two digits and the end token are the three tokens that `length` wants."""
    output = _grpo("try", str(config), "--row", "1", "--completion", "15", "--completion", "it is 15")
    assert "prompt: '11+4='" in output and "answer: '15'" in output
    right, wordy = (_cells(part)[1:] for part in output.split("completion ")[1:])
    assert [row[:5] for row in right if row[0]] == [
        ["form", "1", "1", "0.2", "0.2"],
        ["numeric_match", "1", "1", "1", "1"],
        ["length", "1", "1", "-2", "-2"],
        ["reward", "", "", "", "-0.8"],
    ]
    assert [row[:5] for row in wordy if row[0]] == [
        ["form", "0", "0", "0.2", "0"],
        ["numeric_match", "1", "0", "1", "0"],
        ["length", "1", "1", "-2", "-2"],  # the tokenizer knows digits only
        ["reward", "", "", "", "-2"],
    ]
    assert wordy[1][5] == "gate closed: form gives 0, 1 is needed"
    assert wordy[2][5] == "clipped to 0.5 … 0.75; 0.5 … 0.75 becomes 0 … 1"


def test_a_conversation_is_answered_by_a_message(config: Path, tmp_path: Path) -> None:
    rows = [{"prompt": [{"role": "user", "content": "1+1="}], "answer": "2"}]
    (tmp_path / "chat.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = f"data.train={tmp_path / 'chat.jsonl'}"
    assert _cells(_grpo("try", str(config), "--completion", "2", "--set", data))[2][:2] == ["numeric_match", "1"]


def test_a_reward_that_looks_for_text_in_messages_is_told_its_cause(config: Path, tmp_path: Path) -> None:
    code = "def finds(completions, answer):\n    return [float(a in c) for c, a in zip(completions, answer)]\n"
    (tmp_path / "looking.py").write_text(code)
    rows = [{"prompt": [{"role": "user", "content": "1+1="}], "answer": "2"}]
    (tmp_path / "chat.jsonl").write_text("\n".join(map(json.dumps, rows)))
    one = ["try", str(config), "--completion", "2", "--set", "rewards=[{function='looking:finds'}]"]
    assert "because" not in _grpo(*one).splitlines()[-1]
    chat = ["--set", f"data.train={tmp_path / 'chat.jsonl'}"]
    told = _grpo(*one, *chat)
    assert _cells(told)[1][:2] == ["finds", "0"]
    assert "gives 0 to this, because it reads completions as text" in told
    assert "gives 0 to everything, because" in _grpo(*one, "--completion", "3", *chat)
    code = "import itertools\nNEXT = itertools.count()\ndef drawn(completions):\n    return [float(next(NEXT))]\n"
    (tmp_path / "looking2.py").write_text(code)
    assert "because it reads" not in _grpo(*one, *chat, "--set", "rewards=[{function='looking2:drawn'}]")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["--row", "24"], 2, "--row 24: data.train has 24 rows, counted from 0"),
        (["--set", "rewards.0.args={}"], 2, "reward 'form' needs ['pattern']: neither in its args nor a column"),
        (["--set", "rewards.0.function=format_regx"], 2, "no built-in reward is called 'format_regx'"),
        (["--set", "data.train=none.parquet"], 2, "no such file"),
        (
            ["--set", "data.columns.prompt=promt"],
            2,
            "data.train has no column 'promt' (for data.columns.prompt = 'promt'); its columns are answer: "
            "set data.columns.prompt to what it should be made from",
        ),
        (["--set", "rewards.1.gate=shape"], 2, "rewards.1.gate='shape' is not among the rewards"),
        (["--set", "rewards.0.args={pattern='('}"], 1, f"reward 'form' raised {re.error.__name__}"),
    ],
)
def test_what_cannot_be_tried_is_said(config: Path, arguments: list[str], status: int, said: str) -> None:
    output = _grpo("try", str(config), "--completion", "15", *arguments, status=status)
    assert said in output
