"""bfloat16 passes: what is computed is near float32, what adds up is float32, and no weight is stale."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState

from grpo_core.config.files import load_config
from grpo_core.training.batch import MicroBatch
from grpo_core.training.checkpoint import fingerprint
from grpo_core.training.loop import train
from grpo_core.training.roll_out import roll_out
from grpo_core.training.session import Session, load_session
from grpo_core.training.state import TrainingState
from grpo_core.training.update import update
from tests.conftest import config_values, make_run
from tests.grpo_core.model.exactness import distance, first_update, plain_gradient, rollout_with, updating_gradient

NEAR = 0.03  # relative: bfloat16 has 8 bits


@pytest.fixture(params=[{}, {"use_peft": True, "lora_r": 4}], ids=["whole", "lora"])
def session(request: pytest.FixtureRequest, smooth_model_folder: Path, tmp_path: Path) -> Iterator[Session]:
    values = config_values(smooth_model_folder, tmp_path, mixed_precision="bf16", max_grad_norm=1e9, **request.param)
    yield load_session(make_run(tmp_path / "run", values))
    AcceleratorState._reset_state(reset_partial_state=True)


def _batch(session: Session) -> MicroBatch:
    torch.manual_seed(0)
    return first_update(session, rollout_with(session, torch.randn(session.plan.generation_batch_size)))


def test_without_a_gpu_a_training_is_in_float32_and_only_such_a_one_continues_it(
    smooth_model_folder: Path, tmp_path: Path
) -> None:
    def identity(precision: str, capability: tuple[int, int] | None) -> str:
        config = load_config(run / "config.toml", [f"train.mixed_precision={precision}"])
        return fingerprint(run, config.with_precision(capability), loaded.plan)

    run = make_run(tmp_path / "run", config_values(smooth_model_folder, tmp_path))
    loaded = load_session(run)
    AcceleratorState._reset_state(reset_partial_state=True)
    assert loaded.policy.model is loaded.policy.master
    own = fingerprint(run, loaded.config, loaded.plan)
    assert own == identity("auto", None) == identity("no", None) == identity("no", (9, 0))
    assert own != identity("auto", (9, 0)) == identity("bf16", None)


@pytest.mark.slow
def test_the_gradient_is_near_that_of_float32_and_is_float32(session: Session) -> None:
    batch = _batch(session)
    found = updating_gradient(session, batch)
    assert {gradient.dtype for gradient in found} == {torch.float32}
    assert 0 < distance(found, plain_gradient(session, batch)) < NEAR


@pytest.mark.slow
def test_what_an_attempt_without_memory_left_behind_does_not_count(session: Session) -> None:
    batch = _batch(session)
    expected = updating_gradient(session, batch)
    for parameter in session.policy.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter)
    assert all(torch.equal(a, b) for a, b in zip(updating_gradient(session, batch), expected, strict=True))


@pytest.mark.slow
def test_the_copy_follows_the_masters(session: Session) -> None:
    before = [parameter.clone() for parameter in session.policy.model.parameters()]
    update(session, _batch(session), TrainingState(tokens_per_pass=100))
    roll_out(session, 1, TrainingState(tokens_per_pass=100))
    masters, copies = [*session.model.parameters()], [*session.policy.model.parameters()]
    assert all(torch.equal(copy, own.bfloat16()) for copy, own in zip(copies, masters, strict=True))
    assert any(not torch.equal(copy, old) for copy, old in zip(copies, before, strict=True))
    assert {own.dtype for own in masters if own.requires_grad} == {torch.float32}
    assert all(copy is own for copy, own in zip(copies, masters, strict=True) if not own.requires_grad)
    assert all(buffer.dtype != torch.bfloat16 for buffer in session.policy.model.buffers())


@pytest.mark.slow
def test_a_training_in_bfloat16_learns_and_hands_on_float32(smooth_model_folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    values = config_values(smooth_model_folder, tmp_path, mixed_precision="bf16", beta=0.1, num_iterations=2)
    run = make_run(tmp_path / "run", values)
    train(run, run / "training")
    AcceleratorState._reset_state(reset_partial_state=True)
    steps = [json.loads(line) for line in (run / "training" / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == 4
    assert max(step["sampling/sync_drift"] for step in steps) < 0.02
    weights = load_file(run / "training" / "model" / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
