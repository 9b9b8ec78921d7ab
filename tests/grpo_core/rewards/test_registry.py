"""One record per built-in reward: everything that treats rewards differently asks it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flows.cli.main import app
from flows.parameters.allowed import resolve_allowed
from grpo_core.config.files import parse_config
from grpo_core.config.inputs import RewardConfig
from grpo_core.config.run import RunConfig
from grpo_core.errors import ConfigError, RewardError
from grpo_core.fingerprint import determining, reward_parts
from grpo_core.rewards.builtin.record import BuiltinReward
from grpo_core.rewards.contract import check, range_of, resolve
from grpo_core.rewards.registry import BUILTIN
from grpo_core.rewards.rehearsal import longest_seconds
from tests.conftest import config_values


def loudness(completions: Sequence[Any], model: str = "", threads: int = 1, words: Sequence[str] = ()) -> list[float]:
    """Share of capital letters. A second sentence."""
    return [0.0 for _ in completions]


@pytest.fixture(autouse=True)
def record(monkeypatch: pytest.MonkeyPatch) -> BuiltinReward:
    added = BuiltinReward(
        loudness,
        (0.0, 0.5),
        operational=frozenset({"threads"}),
        args_problem=lambda args: "args.threads is 13" if args.get("threads") == 13 else "",
        asks_a_model=True,
        model_argument="model",
    )
    monkeypatch.setitem(BUILTIN, "loudness", added)
    return added


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "model.safetensors").write_text("1")
    return tmp_path


def _config(folder: Path, **keys: Any) -> RunConfig:
    values = config_values(folder, folder)
    return parse_config({**values, "rewards": [{"function": "loudness", **keys}]})


def test_a_reward_is_found_with_its_range_and_its_rule_about_args() -> None:
    assert resolve(RewardConfig(function="loudness")).range == (0.0, 0.5)
    assert range_of(RewardConfig(function="loudness")) == (0.0, 0.5)
    for refuse in (check, resolve):
        with pytest.raises(RewardError, match=r"reward 'loudness': args\.threads is 13"):
            refuse(RewardConfig(function="loudness", args={"threads": 13}))


def test_a_reward_may_be_named_in_the_form_only_if_its_record_says_that_it_looks_at_text_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    changes = {"rewards": [{"function": "loudness"}]}
    with pytest.raises(ConfigError, match="only have the args that a preset gives it"):
        resolve_allowed("quickstart", changes)
    monkeypatch.setitem(BUILTIN, "loudness", BuiltinReward(loudness, (0.0, 0.5), looks_at_text_only=True))
    assert resolve_allowed("quickstart", changes).rewards[0].function == "loudness"


def test_a_reward_is_listed_with_range_meaning_and_arguments() -> None:
    listed = CliRunner(env={"COLUMNS": "240"}).invoke(app, ["rewards", "list"]).output
    assert "loudness   [0 to 0.5]" in listed
    assert "Share of capital letters. " in listed and "A second sentence" not in listed
    assert "threads = 1" in listed


def test_results_do_not_follow_from_operational_args(folder: Path) -> None:
    one, two = (determining(_config(folder, args={"threads": n}))["rewards"] for n in (1, 2))
    assert one == two
    assert one != determining(_config(folder, args={"words": ["a"]}))["rewards"]


def test_results_follow_from_the_content_of_a_model_folder_not_from_its_name(folder: Path) -> None:
    def parts(name: str) -> Any:
        return reward_parts(_config(folder, args={"model": str(folder / name)}))

    before = parts("weights")
    (folder / "weights").rename(folder / "moved")
    assert parts("moved") == before
    (folder / "moved" / "model.safetensors").write_text("22")
    assert parts("moved") != before


def test_a_reward_that_asks_a_model_is_rehearsed_with_its_whole_timeout(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patient = longest_seconds(_config(folder, timeout=1000.0))
    monkeypatch.setitem(BUILTIN, "loudness", BuiltinReward(loudness, (0.0, 0.5)))
    assert patient > longest_seconds(_config(folder, timeout=1000.0)) + 2 * 900


@pytest.mark.slow
def test_an_isolated_built_in_reward_has_its_rule_about_values_too() -> None:
    for isolated in (False, True):
        reward = resolve(RewardConfig(function="json_schema", isolated=isolated))
        assert reward.value_problems["schema"]("{}") == ""
        assert "no JSON Schema" in reward.value_problems["schema"]("[]")
