"""Two processes step with the gradient that one plain pass over the rows of both has."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState

from grpo_core.data.order import training_order
from grpo_core.planning.plan import load_plan
from grpo_core.training.session import load_session
from tests.conftest import config_values, make_run
from tests.grpo_core.model.exactness import (
    distance,
    first_update,
    move,
    plain_gradient,
    plain_logprobs,
    rollout_with,
    updating_gradient,
)
from tests.grpo_core.training.several import in_two_processes

pytestmark = pytest.mark.served

BOUND = 1e-6  # relative
OPTIONS: dict[str, dict[str, Any]] = {
    "on-policy": {},
    "per completion": {"loss_type": "grpo", "temperature": 0.7},
    "kl": {"beta": 0.1, "num_iterations": 2},
    "two iterations": {"num_iterations": 2},
    "half of a rollout": {"steps_per_generation": 4, "loss_type": "cispo", "epsilon_high": 5.0},
}
# Which rows have no advantage; then one process has nothing to compute.
CASES = [*((name, "half") for name in OPTIONS), ("on-policy", "all but one"), ("half of a rollout", "all but one")]


def _advantages(silent: str, run: Path) -> torch.Tensor:
    plan = load_plan(run / "plan.json")
    torch.manual_seed(0)
    advantages = torch.randn(plan.generation_batch_size)
    row = torch.arange(len(advantages))
    trained = row >= len(row) // 2 if silent == "half" else row == int(training_order(plan, 0, 0)[0, 0, 0])
    return advantages.where(trained, 0.0)


def test_two_processes_step_with_the_plain_gradient(smooth_model_folder: Path, tmp_path: Path) -> None:
    runs: dict[tuple[str, str], Path] = {}
    for number, (name, silent) in enumerate(CASES):
        keys = {"num_processes": 2, "per_device_train_batch_size": 4, "max_grad_norm": 1e9, **OPTIONS[name]}
        values = config_values(smooth_model_folder, tmp_path, **keys)
        runs[name, silent] = make_run(tmp_path / f"two-{number}", values)

    def step(rank: int) -> None:
        for (_, silent), run in runs.items():
            session = load_session(run)
            rollout = rollout_with(session, _advantages(silent, run))
            move(session)
            gradient = updating_gradient(session, first_update(session, rollout))
            if rank == 0:
                torch.save(gradient, run / "gradient.pt")

    in_two_processes(tmp_path, step)

    distances = {}
    for number, ((name, silent), run) in enumerate(runs.items()):
        values = config_values(smooth_model_folder, tmp_path, per_device_train_batch_size=8, **OPTIONS[name])
        session = load_session(make_run(tmp_path / f"one-{number}", values))
        batch = first_update(session, rollout_with(session, _advantages(silent, run)))
        if batch.old_logprobs is not None:
            batch = replace(batch, old_logprobs=plain_logprobs(session, batch).detach())
        move(session)
        distances[name, silent] = distance(torch.load(run / "gradient.pt"), plain_gradient(session, batch))
        AcceleratorState._reset_state(reset_partial_state=True)
    assert {case: found for case, found in distances.items() if not found < BOUND} == {}
