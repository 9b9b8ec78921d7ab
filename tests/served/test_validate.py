"""The validate stage for real: what it refuses, what it leaves behind, the rewards tried in a process of their own."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from prefect import flow
from transformers import AutoTokenizer

from benchmarks.command import python_path
from grpo_core.config.files import load_config, parse_config
from grpo_core.rewards import rehearsal
from grpo_core.system.tables import read_parquet
from tasks.stages.condition import conditions
from tasks.stages.errors import StageError
from tasks.stages.run_directory import open_run
from tasks.validate import validate
from tests.conftest import config_values
from tests.grpo_core.environments import scripted

pytestmark = pytest.mark.slow


def _run(model: Path, folder: Path, name: str, rows: dict[int, dict[str, Any]], **changes: Any) -> Path:
    """A run directory over ten additions, of which `rows` are changed."""
    train = [{"prompt": f"{n}+1=", "answer": str(n + 1), **rows.get(n - 10, {})} for n in range(10, 20)]
    pl.DataFrame(train).write_parquet(folder / "train.parquet")
    held_out = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(30, 35)]
    pl.DataFrame(changes.pop("held_out", held_out)).write_parquet(folder / "eval.parquet")
    values = config_values(model, folder)
    values["data"]["checks"] = changes.pop("checks", {})
    values["data"]["chat_template_kwargs"] = {"mood": changes.pop("mood", "")}
    with open_run(parse_config({**values, **changes, "name": name})) as run:
        return run


def _validate(run: Path) -> None:
    config = load_config(run / "config.toml")
    flow(lambda: validate(run, config), name="validating")()


def test_a_refusal_says_all_at_once_and_leaves_a_report(storage: Path, model_folder: Path, tmp_path: Path) -> None:
    run = _run(model_folder, tmp_path, "refused", {1: {"prompt": ""}, 7: {"answer": None}, 0: {"prompt": "1" * 99}})
    with pytest.raises(StageError) as error:
        _validate(run)
    message = str(error.value)
    assert "blank_prompt (prompt is not blank): broken by 1 rows of train" in message
    assert "train row 7, answer: None breaks missing_value" in message
    assert "train row 0, prompt: '111" in message
    assert "data.checks.blank_prompt = 'drop', data.checks.long_prompt = 'drop', data.checks.missing_value" in message
    rejected = run / "dataset.rejected"
    assert pl.read_csv((rejected / "findings.csv").read_bytes()).height == 3
    broken = {found["check"] for found in json.loads((rejected / "report.json").read_text())["findings"]}
    assert broken == {"blank_prompt", "missing_value", "long_prompt"}
    assert (rejected / "lengths.png").read_bytes().startswith(b"\x89PNG")
    assert not (run / "dataset").exists()


@pytest.mark.e2e
def test_dropped_rows_are_kept_beside_the_others(storage: Path, model_folder: Path, tmp_path: Path) -> None:
    changed = {1: {"prompt": ""}, 2: {"prompt": "31+1="}}
    run = _run(model_folder, tmp_path, "dropping", changed, checks={"blank_prompt": "drop", "overlap": "drop"})
    _validate(run)
    source, kept, dropped = (
        read_parquet(path)
        for path in (
            tmp_path / "train.parquet",
            *(run / "dataset" / f for f in ("train.parquet", "train.dropped.parquet")),
        )
    )
    assert kept.to_dicts() == [row for n, row in enumerate(source.to_dicts()) if n not in changed]
    assert dropped.to_dicts() == [
        {"source_row": 1, "broken_rules": "blank_prompt", "prompt": "", "answer": "12"},
        {"source_row": 2, "broken_rules": "overlap", "prompt": "31+1=", "answer": "13"},
    ]
    report = json.loads((run / "dataset" / "report.json").read_text())
    assert (report["rows_read"]["train"], report["num_prompts"]["train"]) == (10, 8)
    assert report["rehearsal"]["rewards"]["numeric_match"]["right"] == 1.0


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return [1.0]", "reward 'tried' returned 1 values for 24 completions"),
        ("import os; os._exit(3)", "ended with status 3"),
    ],
)
def test_a_reward_that_breaks_its_contract_is_found_before_training(
    storage: Path, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, message: str
) -> None:
    (tmp_path / "tried_rewards.py").write_text(f"def tried(completions):\n    {body}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "tried_rewards", raising=False)
    monkeypatch.setenv("PYTHONPATH", python_path(tmp_path))
    with pytest.raises(StageError, match=message):
        _validate(_run(model_folder, tmp_path, "rehearsed", {}, rewards=[{"function": "tried_rewards:tried"}]))


def test_a_rule_of_promotion_that_no_version_can_keep_is_found_before_training(
    storage: Path, model_folder: Path, tmp_path: Path
) -> None:
    promotion = {"guards": [{"metric": "accuracy", "min": 1.2}]}
    with pytest.raises(StageError, match=r"no version could be promoted.*\n.*min = 1\.2: accuracy is from 0 to 1"):
        _validate(_run(model_folder, tmp_path, "impossible", {}, promotion=promotion))


ADDS = """
import os
from pathlib import Path

with Path(__file__).with_name("pids").open("a") as pids:
    print(os.getpid(), file=pids)

class Adds:
    def reset(self, **row):
        self.sum = 0
        return " Begin."
    def add(self, number: int) -> str:
        '''Adds.

        Args:
            number: What to add.
        '''
        self.sum += number
        return f"now {self.sum}"
    def get_reward(self):
        return float(self.sum)
"""
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {
            "type": "object",
            "properties": {"number": {"type": "integer", "description": "What to add."}},
            "required": ["number"],
        },
    },
}


@pytest.mark.e2e
def test_an_environment_is_tried_measured_and_part_of_the_prompts_lengths(
    storage: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its code runs in processes of its own; what breaks, and a source that changed since, is named."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "adding.py").write_text(ADDS)
    template = "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}{{ mood }}" + scripted.TEMPLATE
    model = scripted.save_model(tmp_path / "talking", template)
    rows: dict[int, dict[str, Any]] = {n: {"prompt": [{"role": "user", "content": f"{n}?"}]} for n in range(10)}
    held_out = [{"prompt": [{"role": "user", "content": f"{n}!"}], "answer": "1"} for n in range(5)]
    environment = {"environment_factory": "adding:Adds", "tool_timeout": 20.0}
    options = {"rollout": {"max_completion_length": 200}, "rewards": [{"function": "environment"}]}
    run = _run(model, tmp_path, "acting", rows, environment=environment, mood="sad", held_out=held_out, **options)
    _validate(run)
    report = json.loads((run / "dataset" / "report.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(model)
    text = tokenizer.apply_chat_template(rows[0]["prompt"], tools=[ADD], mood="sad", add_generation_prompt=True)
    assert report["lengths"]["train"]["max"] == len(text["input_ids"])
    found = report["rehearsal"]["environments"]["adding:Adds"]
    assert (found["rows"], found["reset"]["tokens"], [*found["tools"]]) == (8, len(" Begin."), ["add"])
    pids = (tmp_path / "pids").read_text().split()
    assert pids and str(os.getpid()) not in pids
    (tmp_path / "adding.py").write_text(ADDS.replace("self.sum = 0", "raise KeyError('board')"))
    config = load_config(run / "config.toml")
    assert conditions(run, config)["validate"].reason == "changed: source of adding:Adds (environment)"
    with open_run(config):  # which takes the source as it is now
        pass
    with pytest.raises(StageError, match=r"adding:Adds: reset, with row 0: KeyError: 'board'"):
        _validate(run)


@pytest.mark.e2e
def test_a_reward_that_ignores_its_time_limit_ends_the_rehearsal_in_time_and_is_named(
    storage: Path, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = "while True:\n        try: threading.Event().wait()\n        except BaseException: pass"
    (tmp_path / "clinging_rewards.py").write_text(f"import threading\ndef clings(completions):\n    {body}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", python_path(tmp_path))
    monkeypatch.setattr(rehearsal, "longest_seconds", lambda config: 60.0)
    with pytest.raises(StageError, match="ended after 60 s, trying the reward 'clings', which ignores its own time li"):
        _validate(_run(model_folder, tmp_path, "clinging", {}, rewards=[{"function": "clinging_rewards:clings"}]))
