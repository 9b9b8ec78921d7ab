"""The sampling correction and the off-policy mask see staleness alone, whatever options tokens were drawn with."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState

from grpo_core.config.run import RunConfig
from grpo_core.training.batch import MicroBatch
from grpo_core.training.session import Session, load_session
from tests.conftest import config_values, make_run
from tests.grpo_core.algorithm.plain_losses import PLAIN_LOSSES, plain
from tests.grpo_core.model.exactness import (
    distance,
    first_update,
    gradient_and_metrics,
    move,
    plain_gradient,
    plain_logprobs,
    rollout_with,
    updating_gradient,
)

TRUNCATIONS: list[dict[str, Any]] = [
    *({"top_p": 0.5}, {"top_k": 3}, {"top_p": 0.7, "top_k": 6}, {"top_k": 1}),
    *({"min_p": 0.3}, {"min_p": 0.05, "top_p": 0.8}),
]
TEMPERATURES = [0.05, 0.7, 1.0, 1.6]
LOSSES: list[dict[str, Any]] = [
    *({"loss_type": name, **loss.needs} for name, loss in PLAIN_LOSSES.items()),
    {"loss_type": "grpo", "importance_sampling_level": "sequence"},
]
MODES = ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
CACHES = ["group cache", "plain cache"]


def _combinations(count: int) -> Iterator[Any]:
    """Options drawn together; each loss and each mode comes up as often as the others."""
    draw = random.Random(0)
    for number in range(count):
        loss = LOSSES[number % len(LOSSES)]
        modes = plain(loss["loss_type"]).drawn.get("vllm_importance_sampling_mode", MODES)
        algorithm = {
            **loss,
            "vllm_importance_sampling_mode": modes[number % len(modes)],
            "vllm_importance_sampling_clip_min": draw.choice([None, 0.5]),
            "off_policy_mask_threshold": draw.choice([None, 0.01]),
        }
        rollout = {"temperature": draw.choice(TEMPERATURES), **draw.choice(TRUNCATIONS)}
        cache = draw.choice(CACHES)
        name = "-".join(str(value) for value in (*rollout.values(), *algorithm.values(), cache))
        yield pytest.param(rollout, algorithm, cache, id=name)


@pytest.fixture(scope="module")
def trained(smooth_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    folder = tmp_path_factory.mktemp("run")
    values = config_values(smooth_model_folder, folder, max_grad_norm=1e9, max_completion_length=8)
    yield load_session(make_run(folder / "run", values))
    AcceleratorState._reset_state(reset_partial_state=True)


def _with(session: Session, rollout: dict[str, Any], algorithm: dict[str, Any]) -> Session:
    """The session as if it had been set up with these keys."""
    values = session.config.model_dump()
    config = RunConfig.model_validate(
        {**values, "rollout": values["rollout"] | rollout, "algorithm": values["algorithm"] | algorithm}
    )
    session.policy.temperature = config.rollout.temperature
    return replace(session, config=config)


def _begun(
    trained: Session, rollout: dict[str, Any], algorithm: dict[str, Any], cache: str
) -> tuple[Session, MicroBatch]:
    """The session with these keys, and the first update of a rollout with random advantages."""
    session = _with(trained, rollout, algorithm)
    session.sampler.engine.shares_cache = cache == "group cache"  # type: ignore[attr-defined]
    torch.manual_seed(0)
    batch = first_update(session, rollout_with(session, torch.randn(session.plan.generation_batch_size)))
    return session, batch


@pytest.mark.slow
@pytest.mark.parametrize(("rollout", "algorithm", "cache"), _combinations(18))
def test_truncated_sampling_leaves_an_on_policy_gradient_as_it_is(
    trained: Session, rollout: dict[str, Any], algorithm: dict[str, Any], cache: str
) -> None:
    session, batch = _begun(trained, rollout, algorithm, cache)
    uncorrected = _with(session, {}, {"vllm_importance_sampling_correction": False, "off_policy_mask_threshold": None})
    gradient, metrics = gradient_and_metrics(session, batch)
    assert distance(gradient, plain_gradient(uncorrected, batch)) < 1e-4
    assert metrics["sampling/sampling_logp_difference/max"] < 1e-5
    assert metrics["sampling/importance_sampling_ratio/min"] == pytest.approx(1, abs=1e-4)
    assert metrics["sampling/importance_sampling_ratio/max"] == pytest.approx(1, abs=1e-4)
    assert metrics.get("off_policy_mask/kept", 1) == 1


@pytest.mark.parametrize(("rollout", "algorithm", "cache"), _combinations(9))
def test_truncated_samples_of_another_policy_are_corrected_by_the_ratio_of_the_whole_distributions(
    trained: Session, rollout: dict[str, Any], algorithm: dict[str, Any], cache: str
) -> None:
    session, batch = _begun(trained, rollout, algorithm, cache)
    sampled_with = plain_logprobs(session, batch).detach()
    weights = [parameter.detach().clone() for parameter in session.model.parameters()]
    move(session)
    moved = (plain_logprobs(session, batch).detach() - sampled_with) * batch.mask
    found = updating_gradient(session, batch)
    expected = plain_gradient(session, replace(batch, sampling_logprobs=sampled_with))
    with torch.no_grad():
        for parameter, before in zip(session.model.parameters(), weights, strict=True):
            parameter.copy_(before)
    assert moved.abs().max() > 1e-3
    assert distance(found, expected) < 1e-4
