"""On a GPU, the host waits for the device to end an update and to read what scoring found, and never between passes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from accelerate.state import AcceleratorState, PartialState
from torch import distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from grpo_core.config.files import parse_config
from grpo_core.config.losses import LossType
from grpo_core.distributed import average_gradients
from grpo_core.training.roll_out import compute_logprobs
from grpo_core.training.session import load_session
from grpo_core.training.state import TrainingState
from grpo_core.training.update import update
from tests.conftest import config_values, make_run
from tests.grpo_core.algorithm.plain_losses import plain
from tests.grpo_core.model.exactness import first_update, rollout_with
from tests.pretend_gpu import Gpu, pretend_gpu

START = TrainingState(tokens_per_pass=100)
EVERYTHING = {
    "beta": 0.1,
    "num_iterations": 2,
    "entropy_coef": 0.1,
    "top_entropy_quantile": 0.5,
    "off_policy_mask_threshold": 0.1,
    "importance_sampling_level": "sequence",
    "mixed_precision": "bf16",
}


def _own(gpu: Gpu) -> list[str]:
    """The waits, without that of transformers in each pass over padded rows: are they several sequences in one row?"""
    return [wait for wait in gpu.waits if not (wait.startswith("_local_scalar_dense") and "model/policy.py" in wait)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keys", "packs", "loss_types"),
    [
        pytest.param({}, True, ["dapo"], id="plain", marks=pytest.mark.e2e),
        pytest.param(EVERYTHING, True, get_args(LossType), id="everything"),
        pytest.param(EVERYTHING, False, ["dapo"], id="everything, padded", marks=pytest.mark.e2e),
    ],
)
def test_no_pass_waits_for_the_one_before(
    smooth_model_folder: Path, tmp_path: Path, keys: dict[str, Any], packs: bool, loss_types: list[str]
) -> None:
    values = config_values(smooth_model_folder, tmp_path, **keys)
    with pretend_gpu() as gpu:
        session = load_session(make_run(tmp_path / "run", values))
        session.policy.packs = packs
        rollout = rollout_with(session, torch.randn(session.plan.generation_batch_size))
        session.memory.tokens = 30  # several passes
        gpu.waits.clear()
        compute_logprobs(session, session.policy, rollout, rollout.completion_mask.sum(1) > 0)
        assert len(_own(gpu)) == 1, "the log-probabilities are read"
        for loss_type in loss_types:
            different = {**keys, "loss_type": loss_type, **plain(loss_type).needs}
            config = parse_config(config_values(smooth_model_folder, tmp_path, **different))
            batch = first_update(session, rollout)
            gpu.waits.clear()
            update(replace(session, config=config), batch, START)
            assert len(_own(gpu)) == 2, "the figures are read before the step, and whether all weights are finite"
        assert not gpu.mismatches
    AcceleratorState._reset_state(reset_partial_state=True)


def test_the_mean_of_gradients_over_processes_is_not_waited_for() -> None:
    with pretend_gpu() as gpu:
        dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
        try:
            PartialState().num_processes = 2
            parameters = [torch.nn.Parameter(torch.zeros(size, device="cuda")) for size in (2**20, 3, 2)]
            for parameter in parameters[:2]:
                parameter.grad = torch.ones_like(parameter)
            gpu.waits.clear()
            average_gradients(parameters)
            assert not gpu.waits
            assert not gpu.mismatches
            assert parameters[2].grad is None
        finally:
            dist.destroy_process_group()
