"""Trainings of mixtures of experts: how far the engine's routing differs, and the engine's experts replayed."""

from __future__ import annotations

import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from grpo_core.config.run import RunConfig
from grpo_core.errors import ConfigError
from grpo_core.model.loading import load_model
from grpo_core.training import loop, roll_out
from grpo_core.training.loop import train
from tests.conftest import config_values, make_model, make_run, with_keys
from tests.grpo_core.training import killing
from tests.grpo_core.training.test_replay import assert_replayed, on_recording
from tests.grpo_core.training.training import assert_same, checkpoint_of, metrics_of, trained_run

EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 32}
DIFFERENCE = "sampling/routing_difference"
REPLAYED = {"routing_replay": True, "num_iterations": 2, "max_steps": 4, "save_steps": 1}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("mixture"), "Qwen3Moe", **EXPERTS)


@pytest.fixture
def values(mixture: Path, tmp_path: Path) -> dict[str, Any]:
    return config_values(mixture, tmp_path)


@pytest.fixture
def other_routers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer's routers are changed after each generation batch is sampled: an engine with other numerics."""
    collect = roll_out.collect

    def collected(request: Any, groups: Any) -> Any:
        found = collect(request, groups)
        for layer in request.engine.model.model.layers:
            layer.mlp.gate.weight.data += 0.3 * torch.randn_like(layer.mlp.gate.weight)
        return found

    monkeypatch.setattr(roll_out, "collect", collected)


@pytest.mark.parametrize("iterations", [1, 2], ids=["in the update", "in the pass before it"])
def test_experts_that_the_engine_did_not_choose_are_counted_and_break_a_limit(
    iterations: int, values: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str], other_routers: None
) -> None:
    run = make_run(
        tmp_path / "run", with_keys(values, max_steps=2, save_steps=1, num_iterations=iterations, patience=1)
    )
    train(run, run / "training")
    assert all(0.2 < row[DIFFERENCE] < 1 for row in metrics_of(run))
    assert f"{DIFFERENCE} = " in capfd.readouterr().out
    assert "routed_experts" not in pq.read_schema(run / "training/completions/rollout-000000.parquet").names
    assert checkpoint_of(run, 1)["state"]["rollout"]["routes"] is None, "they take room, and have been compared"


@pytest.mark.parametrize("iterations", [1, 2])
def test_the_same_weights_choose_as_the_engine_did(iterations: int, values: dict[str, Any], tmp_path: Path) -> None:
    run = trained_run(tmp_path / "run", values, max_steps=2, num_iterations=iterations)
    assert [row[DIFFERENCE] for row in metrics_of(run)] == [0.0, 0.0]


def test_replay_takes_the_engine_s_experts_in_old_log_probabilities_and_in_the_update(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other_routers: None
) -> None:
    taken: list[bool] = []

    def load_session(*arguments: Any) -> Any:
        session = loaded(*arguments)
        session.model.model.layers[0].mlp.experts.register_forward_pre_hook(note)
        prepare = session.policy.prepare

        def prepared(sequences: Any) -> Any:
            inputs = prepare(sequences)
            if inputs.routes is not None:
                expected.append(inputs.routes[:, :2].long().sort(-1).values)
            return inputs

        session.policy.prepare = prepared
        return session

    expected: list[torch.Tensor] = []

    def note(module: Any, arguments: tuple[torch.Tensor, ...]) -> None:
        found = arguments[1].sort(-1).values
        if any(found.shape == each.shape for each in expected):
            taken.append(any(torch.equal(found, each) for each in expected))

    loaded = loop.load_session
    monkeypatch.setattr(loop, "load_session", load_session)
    run = make_run(tmp_path / "run", with_keys(values, **REPLAYED | {"max_steps": 2}))
    train(run, run / "training")
    assert len(taken) >= 3, "old log-probabilities, and two updates"
    assert all(taken)
    assert metrics_of(run)[0][DIFFERENCE] > 0.2, "what the trainer would have chosen"


def same(prompts: list[str], completion_ids: list[list[int]]) -> list[float]:
    return [1.0] * len(prompts)


def test_routers_are_balanced_over_completions_without_an_advantage_too(values: dict[str, Any], tmp_path: Path) -> None:
    values["rewards"] = [{"function": f"{__name__}:same"}]
    run = trained_run(tmp_path / "run", values, router_aux_loss_coef=0.3, max_steps=2, num_iterations=2)
    for row in metrics_of(run):
        assert row["frac_reward_zero_std"] == 1
        assert row["loss"] == pytest.approx(0.3 * row["aux_loss"], rel=1e-5)
        assert row["grad_norm"] > 1e-3
        assert row["sampling/sampling_logp_difference/max"] < 1e-3, "their old log-probabilities are computed"


@pytest.mark.slow
def test_a_replaying_training_that_is_killed_ends_as_the_undisturbed_one(
    values: dict[str, Any], tmp_path: Path
) -> None:
    whole = make_run(tmp_path / "whole", with_keys(values, **REPLAYED))
    assert killing.train(whole) == 0
    passes = int((whole / "passes").read_text())
    for kill_at in range(passes // 4, passes, passes // 4):
        run = make_run(tmp_path / f"killed-{kill_at}", with_keys(values, **REPLAYED))
        assert killing.train(run, kill_at) == signal.SIGKILL
        assert killing.train(run) == 0
        assert_same(run, whole)


@pytest.mark.slow
def test_a_recording_has_the_experts_that_are_replayed(values: dict[str, Any], tmp_path: Path) -> None:
    recorded = trained_run(tmp_path / "recorded", values, **REPLAYED)
    run = trained_run(tmp_path / "run", on_recording(recorded, values), **REPLAYED)
    assert_replayed(run, recorded)
    without = trained_run(tmp_path / "without", values, max_steps=1)
    lacking = make_run(tmp_path / "lacking", with_keys(on_recording(without, values), routing_replay=True, max_steps=1))
    with pytest.raises(ConfigError, match="does not say which experts the engine took"):
        train(lacking, lacking / "training")


@pytest.mark.parametrize("keys", [{"routing_replay": True}, {"router_aux_loss_coef": 0.1}], ids=str)
def test_a_model_without_routers_is_refused_before_a_step(
    keys: dict[str, Any], model_folder: Path, tmp_path: Path
) -> None:
    run = make_run(tmp_path / "run", with_keys(config_values(model_folder, tmp_path), **keys))
    with pytest.raises(ConfigError, match="Qwen2ForCausalLM has no routers"):
        train(run, run / "training")


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"routing_replay": True, "torch_compile": True}, "routers are not read in compiled layers"),
        ({"router_aux_loss_coef": 0.1, "torch_compile": True}, "routers are not read in compiled layers"),
        ({"routing_replay": True, "engine": "vllm-server"}, "the experts that are taken there are not kept"),
        ({"routing_replay": True, "environment": {"tools": ["x:y"]}}, "the experts that are taken there are not kept"),
    ],
)
def test_what_cannot_be_combined_is_refused_with_the_configuration(
    keys: dict[str, Any], reason: str, values: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match=reason):
        own = {name: value for name, value in keys.items() if name != "environment"}
        RunConfig.model_validate(with_keys(values, **own) | {"environment": keys.get("environment", {})})


def test_vllm_s_experts_are_those_of_the_layers_that_have_routers() -> None:
    """A pretended output: it needs a GPU's model runner. Layer 0 is dense."""
    from grpo_core.rollout.vllm.colocated_engine import _completions

    routed = np.arange(4 * 3 * 2, dtype=np.uint8).reshape(4, 3, 2)  # all tokens but the last, all layers
    logprobs = SimpleNamespace(logprobs=[-1.0, -2.0])
    completion = SimpleNamespace(
        index=0, token_ids=[7, 8], logprobs=logprobs, finish_reason="stop", routed_experts=routed
    )
    output = SimpleNamespace(prompt_token_ids=[1, 2, 3], outputs=[completion])
    (found,) = _completions(output, [1, 2])
    assert found.routes is not None
    assert found.routes.dtype == np.int16
    assert found.routes.tolist() == [[2, 3, 4, 5], [8, 9, 10, 11], [14, 15, 16, 17], [20, 21, 22, 23], [0, 0, 0, 0]]
    (plain,) = _completions(output, None)
    assert plain.routes is None


def test_vllm_on_a_cpu_is_refused_with_replay(mixture: Path, values: dict[str, Any]) -> None:
    from grpo_core.rollout.vllm.colocated_engine import VLLMEngine

    config = RunConfig.model_validate(with_keys(values, routing_replay=True, engine="vllm"))
    with pytest.raises(ConfigError, match="vLLM on a CPU, where it does not say which experts it took"):
        VLLMEngine(config, mixture, load_model(mixture), 16)
