"""The gradient that processes with shares of a model step with is the plain one of all rows, by one whole model."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from torch import Tensor

from grpo_core.config.files import parse_config
from grpo_core.model.sharded import is_sharded
from grpo_core.training.session import Session, load_session
from tests.conftest import config_values, make_model, make_run, with_keys
from tests.grpo_core.model.exactness import (
    distance,
    first_update,
    move,
    plain_gradient,
    plain_logprobs,
    rollout_with,
    updating_gradient,
)
from tests.grpo_core.training.several import in_processes
from tests.grpo_core.training.test_sharding import EXPERTS, LOSSES, TIED

pytestmark = pytest.mark.served

BOUND = 1e-6  # relative
COMPLETIONS, PER_PASS = 16, 4
SMOOTH = {"initializer_range": 0.03}  # see `smooth_model_folder`
# Two passes over a rollout, so that ratios are not 1, and KL to a reference that is sharded too.
WINDOW = {"num_iterations": 2, "beta": 0.1}
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "tied": ("Qwen2", TIED, WINDOW),
    "experts": ("Qwen3Moe", EXPERTS, WINDOW),
    "adapter": ("Qwen2", {}, WINDOW | {"use_peft": True, "lora_r": 4}),
    "on-policy": ("Qwen2", {}, {}),
}


def _values(model: Path, folder: Path, processes: int, sharding: str, keys: dict[str, Any]) -> dict[str, Any]:
    steps = COMPLETIONS // (PER_PASS * processes)
    batch = {"num_processes": processes, "sharding": sharding, "gradient_accumulation_steps": steps}
    values = config_values(model, folder, per_device_train_batch_size=PER_PASS, max_grad_norm=1e9)
    return with_keys(values, **batch, **keys)


def _advantages(name: str) -> Tensor:
    """An update's advantages. On-policy, a single completion is trained: most processes have nothing to compute."""
    torch.manual_seed(0)
    advantages = torch.randn(COMPLETIONS)
    return advantages.where(torch.arange(COMPLETIONS) == 5, 0.0) if name == "on-policy" else advantages


def _losses(name: str, processes: int) -> dict[str, dict[str, Any]]:
    """All loss types where heads are tied, and with experts where `make e2e` has more processes."""
    every = name == "tied" or (name == "experts" and processes > 2)
    return LOSSES if every else {"dapo": {}}


def _gradients(
    run: Path, values: dict[str, Any], name: str, losses: dict[str, dict[str, Any]]
) -> Iterator[tuple[str, Tensor, list[Tensor]]]:
    """Per loss type its name, the tokens of the update, and the gradient: by whole plain passes if the model is whole,
    as the loop computes it if it is sharded. The weights have moved since they sampled."""
    session: Session = load_session(make_run(run, values))
    sharded = is_sharded(session.policy.master)
    assert session.policy.packs  # prompts are computed once per group
    rollout = rollout_with(session, _advantages(name))
    old = None
    if not sharded:
        old = plain_logprobs(session, first_update(session, rollout)).detach()
    move(session)
    for loss, keys in losses.items():
        changed = replace(session, config=parse_config(with_keys(values, **keys)))
        batch = first_update(changed, rollout)
        if old is not None and batch.old_logprobs is not None:
            batch = replace(batch, old_logprobs=old)
        gradient = updating_gradient(changed, batch) if sharded else plain_gradient(changed, batch)
        yield loss, batch.sequences.input_ids, gradient


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: make_model(folder / name, kind, **shape, **SMOOTH) for name, (kind, shape, _) in MODELS.items()}


@pytest.mark.parametrize(
    ("processes", "sharding"),
    [
        (2, "full"),
        pytest.param(4, "full", marks=pytest.mark.e2e),
        pytest.param(4, "hybrid", marks=pytest.mark.e2e, id="two machines"),
    ],
)
def test_shared_models_step_with_the_plain_gradient(
    models: dict[str, Path], tmp_path: Path, processes: int, sharding: str
) -> None:
    def start(rank: int) -> None:
        os.environ["LOCAL_WORLD_SIZE"] = "2"
        for name, (_, _, keys) in MODELS.items():
            values = _values(models[name], tmp_path, processes, sharding, keys)
            losses = _losses(name, processes)
            found = {loss: rest for loss, *rest in _gradients(tmp_path / f"{name}-{rank}", values, name, losses)}
            if rank == 0:
                torch.save(found, tmp_path / f"{name}.pt")

    in_processes(processes, tmp_path, start)
    distances = {}
    for name, (_, _, keys) in MODELS.items():
        found = torch.load(tmp_path / f"{name}.pt")
        values = _values(models[name], tmp_path, 1, "none", keys)
        for loss, tokens, gradient in _gradients(tmp_path / f"{name}-whole", values, name, _losses(name, processes)):
            assert tokens.equal(found[loss][0]), "both have trained on the same rows"
            distances[name, loss] = distance(found[loss][1], gradient)
        AcceleratorState._reset_state(reset_partial_state=True)
    assert {case: found for case, found in distances.items() if not found < BOUND} == {}
