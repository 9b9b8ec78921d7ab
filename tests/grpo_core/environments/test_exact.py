"""Trainings on conversations, with an environment that draws random numbers: the same in every mode, killed or not.

Which conversations are sampled together follows from when tools answer. So the last bits of log-probabilities, and of
weights, are not the same twice; tokens, calls and answers are.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from accelerate.state import AcceleratorState

from grpo_core.config.environment import EnvironmentConfig
from grpo_core.environments.processes import Environments
from grpo_core.environments.turns import TurnFormat
from grpo_core.errors import NotFiniteError
from grpo_core.evaluation.run import evaluate
from grpo_core.model import policy
from grpo_core.training import loop as trainer
from grpo_core.training.loop import train
from tests.conftest import with_keys
from tests.grpo_core.environments.talking import (
    DICE,
    let_any_text_call,
    make_model,
    make_talking_run,
    said_in,
    share_environments,
    talking_values,
)
from tests.grpo_core.training import killing
from tests.grpo_core.training.plain_training import assert_plain
from tests.grpo_core.training.several import in_two_processes
from tests.grpo_core.training.test_loop import CALM_ADAM
from tests.grpo_core.training.test_replay import assert_replayed
from tests.grpo_core.training.training import are_close, figures_of, result_of
from tests.teacher_server import teacher_server

pytestmark = pytest.mark.served

# As in test_resume: every update begins elsewhere in a generation batch.
EVERYTHING = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 3,
    "steps_per_generation": 2,
    "num_iterations": 2,
    "max_steps": 5,
    "save_steps": 2,
    "beta": 0.1,
    "dynamic_sample": True,
    "eval_steps": 3,
    **CALM_ADAM,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def environments() -> Iterator[Environments]:
    started = Environments(EnvironmentConfig.model_validate(DICE))
    yield started
    started.close()


@pytest.fixture(autouse=True)
def talking(monkeypatch: pytest.MonkeyPatch, environments: Environments) -> Iterator[None]:
    let_any_text_call(monkeypatch)
    share_environments(monkeypatch, environments)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("kills", [2, pytest.param(12, marks=pytest.mark.e2e)])
def test_a_training_on_conversations_killed_at_any_micro_step_ends_with_the_same_weights(
    model: Path, tmp_path: Path, kills: int
) -> None:
    values = talking_values(model, **EVERYTHING)
    whole = make_talking_run(tmp_path / "whole", values)
    assert killing.train(whole) == 0
    said = said_in(whole)
    assert {row["turns"] for row in said} > {1, 2, 3} and any(row["failed_tool_calls"] for row in said)
    assert {"eval_reward", "dynamic_sampling/resampled_groups"} <= figures_of(whole)[2].keys()
    passes = int((whole / "passes").read_text())
    for position in range(kills):
        kill_at = passes * (1 + position) // (kills + 1)
        run = make_talking_run(tmp_path / f"killed-at-{kill_at}", values)
        assert os.WTERMSIG(killing.train(run, kill_at)) == signal.SIGKILL
        assert killing.train(run) == 0
        assert said_in(run) == said
        assert are_close(run, whole)
        assert result_of(run)["counted"] == result_of(whole)["counted"]


@pytest.mark.parametrize(
    "keys",
    [
        {"loss_type": "grpo"},
        {"importance_sampling_level": "sequence", "num_iterations": 2, "beta": 0.1, "top_p": 0.8, "top_k": 9},
        pytest.param({"top_entropy_quantile": 0.3, "max_steps": 3}, marks=pytest.mark.e2e),
        pytest.param({"use_peft": True, "lora_r": 4, "gradient_accumulation_steps": 2}, marks=pytest.mark.e2e),
    ],
)
@pytest.mark.parametrize("packs", [True, False], ids=["packed", "padded"])
def test_a_training_on_conversations_is_that_of_plain_loops(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any], packs: bool
) -> None:
    if not packs:
        monkeypatch.setattr(policy, "why_not_packed", lambda _: "asked")
    values = talking_values(model, **CALM_ADAM, **keys)
    if keys.get("beta"):  # a teacher, which is no copy of the policy
        teacher = make_model(tmp_path / "teacher", hidden_size=32, initializer_range=0.1)
        values["teacher"] = {"model": str(teacher), "weight": 0.3}
    if "loss_type" in keys:  # the policy, where a tool has failed
        values["teacher"] = {"template": "{prompt}, of which {error} was the end, and {answer} right", "weight": 0.3}
    if "teacher" in values and not packs:
        values["teacher"]["divergence_beta"] = 0.7
    with teacher_server(teacher) if packs and keys.get("beta") else nullcontext() as server:
        if server:
            values["teacher"]["url"] = server.url
        run = make_talking_run(tmp_path / "run", values)
        train(run, run / "training")
    assert_plain(run)
    if "loss_type" in keys:
        failed = sum(any(said["content"].startswith("Error") for said in row) for row in conversations(run))
        shown = [step["teacher_shown"] for step in figures_of(run)]
        assert 0 < failed == sum(shown) * len(said_in(run)) / len(shown) < len(said_in(run))


def conversations(run: Path) -> list[list[dict[str, Any]]]:
    return [json.loads(row["conversation"]) for row in said_in(run)]


@pytest.mark.parametrize("sharding", ["none", pytest.param("full", marks=pytest.mark.e2e)])
def test_two_processes_hold_the_conversations_of_one_and_train_to_its_result(
    model: Path, tmp_path: Path, sharding: str
) -> None:
    keys = {**CALM_ADAM, "gradient_accumulation_steps": 2, "dynamic_sample": True, "eval_steps": 2}
    one = make_talking_run(tmp_path / "one", talking_values(model, **keys))
    train(one, one / "training")
    both = {"per_device_train_batch_size": 4, "num_processes": 2, "sharding": sharding}
    shared = make_talking_run(tmp_path / "shared", talking_values(model, **keys, **both))
    in_two_processes(tmp_path / "group", lambda _: train(shared, shared / "training"))
    names = ("conversation", "completion_ids", "trained_tokens", "rewards/environment", "environment_failure")
    first, second = ([[row[name] for name in names] for row in said_in(run)] for run in (one, shared))
    assert first == second
    evaluated = [result_of(run)["metrics"]["eval_reward"] for run in (one, shared)]
    assert evaluated[0] == pytest.approx(evaluated[1], abs=1e-9)
    assert are_close(one, shared)


def test_a_training_on_conversations_that_rolls_back_holds_others_about_the_same_tasks(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = talking_values(model, max_steps=2, not_finite_action="roll_back")
    first, run = (make_talking_run(tmp_path / name, values) for name in ("first", "run"))
    update, calls = trainer.update, 0

    def failing(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 1:
            shutil.copytree(run / "training" / "completions", first / "training" / "completions")
            raise NotFiniteError("step 1")
        return update(*arguments)

    monkeypatch.setattr(trainer, "update", failing)
    assert train(run, run / "training")["roll_backs"] == 1
    before, after = said_in(first), [row for row in said_in(run) if row["step"] == 1]
    assert [row["prompt_tokens"] for row in before] == [row["prompt_tokens"] for row in after]
    assert [row["prompt"] for row in before] == [row["prompt"] for row in after]
    assert [row["completion_ids"] for row in before] != [row["completion_ids"] for row in after]


def test_an_evaluation_has_pass_at_k_turns_calls_and_failures_of_its_conversations(model: Path, tmp_path: Path) -> None:
    values = talking_values(model, max_steps=1)
    values["evaluation"] = {"num_samples": 4, "temperature": 1.0}
    run = make_talking_run(tmp_path / "run", values)
    train(run, run / "training")
    found = evaluate(run, tmp_path)["sets"]["held-out"]["policies"]["trained"]
    samples = pl.read_parquet(tmp_path / "samples.parquet")
    assert 0 < found["pass@1"]["mean"] < found["pass@4"]["mean"]
    assert found["conversations/mean_turns"]["mean"] == pytest.approx(samples["trained/turns"].mean())
    assert found["conversations/tool_calls"]["mean"] > found["conversations/failed_tool_calls"]["mean"] > 0
    assert found["conversations/failed"]["mean"] == 0
    assert set(samples["trained/environment_failure"]) == {""}


def test_calls_that_are_never_read_are_warned_of_once(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    values = talking_values(model, max_steps=1)
    train(*_run_and_output(tmp_path / "calling", values))
    assert "no tool was called" not in capsys.readouterr().out
    AcceleratorState._reset_state(reset_partial_state=True)
    monkeypatch.setattr(TurnFormat, "read", lambda *_: ("I roll(2).", []))
    train(*_run_and_output(tmp_path / "unread", values))
    (said,) = [line for line in capsys.readouterr().out.splitlines() if "no tool was called" in line]
    assert said.startswith(
        "training: no tool was called in 8 conversations, and 8 of their 8 turns look as if they meant to, the first "
        "by 'I roll(2).'. Calls are read as the model's chat template writes them (form None)"
    )


def _run_and_output(folder: Path, values: dict[str, Any]) -> tuple[Path, Path]:
    return make_talking_run(folder, values), folder / "training"


def test_a_training_on_recorded_conversations_holds_none_and_ends_with_the_same_weights(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, since the last bits of what was sampled are recorded."""
    values = talking_values(model, num_iterations=2, max_steps=4, beta=0.1)
    recorded = make_talking_run(tmp_path / "recorded", values)
    train(recorded, recorded / "training")
    assert {0, 1} <= {kind for row in said_in(recorded) for kind in row["trained_tokens"]}
    monkeypatch.delattr("grpo_core.training.session.make_engine")
    run = make_talking_run(tmp_path / "run", with_keys(values, engine="recorded", recording=str(recorded)))
    train(run, run / "training")
    assert_replayed(run, recorded)
