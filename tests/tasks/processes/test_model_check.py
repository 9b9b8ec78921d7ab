"""A model is tried once for what a trial depends on, and a trial that fails is a sentence, not an end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from grpo_core.config.files import parse_config
from grpo_core.errors import ConfigError
from tasks.processes.measure import check_model
from tasks.stages.errors import StageError
from tests.conftest import config_values
from tests.tasks.processes.measuring import Machine


@pytest.fixture
def trial(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    return Machine(monkeypatch, tmp_path, {"refused": ""})


def _check(folder: Path, model: str = "model", prompt_tokens: int = 9, **keys: Any) -> list[str]:
    said: list[str] = []
    check_model(parse_config(config_values(folder / model, folder, **keys)), prompt_tokens, None, said.append)
    return said


def test_a_copy_is_tried_once_and_again_when_something_that_it_depends_on_changes(
    trial: Machine, tmp_path: Path
) -> None:
    (announced,) = _check(tmp_path)
    assert announced.startswith("a small copy of the model is tried")
    for keys in ({}, {"learning_rate": 0.5}, {"temperature": 0.7}, {"per_device_train_batch_size": 4}):
        assert _check(tmp_path, **keys) == []
    assert _check(tmp_path, "moved") == [], "the same configuration elsewhere"
    assert len(trial.asked) == 1
    for keys in ({"use_peft": True}, {"mixed_precision": "bf16"}, {"routing_replay": True}, {"engine": "vllm-server"}):
        _check(tmp_path, **keys)
    _check(tmp_path, prompt_tokens=10)
    (tmp_path / "model" / "config.json").write_text('{"hidden_size": 7}')
    _check(tmp_path)
    assert len(trial.asked) == 7
    assert trial.asked[0]["model"]["name_or_path"] == str(tmp_path / "model")
    assert trial.asked[0]["max_length"] == 9 + 6
    assert {*trial.seen} == {""}, "on the CPU"


def test_a_refused_model_is_refused_each_time(trial: Machine, tmp_path: Path) -> None:
    trial.printed = [json.dumps({"refused": "its layers are of a kind that nothing samples from"})]
    for _ in range(2):
        with pytest.raises(StageError, match="the training would refuse this model: its layers are of a kind"):
            _check(tmp_path)
    assert len(trial.asked) == 1


@pytest.mark.parametrize("printed", [["Traceback", "out of memory"], []])
def test_a_trial_that_fails_says_why_refuses_nothing_and_is_not_kept(
    printed: list[str], trial: Machine, tmp_path: Path
) -> None:
    trial.printed, trial.error = printed, StageError("ended with status 1")
    for _ in range(2):
        assert _check(tmp_path)[1].endswith(f"copy of it: {printed[-1] if printed else 'ended with status 1'}")
    assert len(trial.asked) == 2


def test_nothing_is_tried_of_a_model_that_is_elsewhere_or_where_it_is_not_wanted(
    trial: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model" / "config.json").unlink()
    assert _check(tmp_path) == []
    monkeypatch.setenv("GRPO_MEASURE", "0")
    assert _check(tmp_path, "moved") == []
    assert trial.asked == []


def test_a_storage_that_cannot_be_written_prevents_no_plan(
    trial: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("GRPO_STORAGE", str(tmp_path / "file"))
    assert len(_check(tmp_path)) == 1


def test_replay_with_vllm_on_a_cpu_is_refused(trial: Machine, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="vLLM on a CPU, where it does not say which experts it took"):
        _check(tmp_path, routing_replay=True, engine="vllm")
    assert trial.asked == []
