"""An update's rows are divided among however many processes; some may have none."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState

from grpo_core.config.files import parse_config
from grpo_core.config.run import RunConfig
from grpo_core.config.teacher import TeacherConfig
from grpo_core.data.order import training_order
from grpo_core.model.loading import load_model
from grpo_core.model.policy import Policy
from grpo_core.planning.plan import Plan, make_plan, plan_inputs
from grpo_core.rollout.types import Rollout
from grpo_core.training.batch import own_rows, update_batch
from grpo_core.training.out_of_memory import OutOfMemoryRetry
from grpo_core.training.state import TrainingState
from grpo_core.training.update import update
from tests.conftest import config_values
from tests.grpo_core.model.exactness import gradient_and_metrics

MICRO_STEP = 16  # completions of all processes
G = 4
LONGEST = 24
START = TrainingState(tokens_per_pass=100)


@pytest.fixture
def policy(smooth_model_folder: Path) -> Iterator[Policy]:
    yield Policy(load_model(smooth_model_folder), 0.9)
    AcceleratorState._reset_state(reset_partial_state=True)


def _set_up(options: dict[str, Any], processes: int) -> tuple[RunConfig, Plan]:
    keys = {"num_processes": processes, "per_device_train_batch_size": MICRO_STEP // processes}
    lengths = {"num_generations": G, "max_completion_length": LONGEST, "temperature": 0.9, "max_grad_norm": 1e9}
    config = parse_config(config_values(Path("model"), Path("data"), **keys, **lengths, **options))
    return config, make_plan(plan_inputs(config, 100))


def _session(policy: Policy, config: RunConfig, plan: Plan, process: int) -> Any:
    """What `update` takes of a session, on one of the plan's processes."""
    accelerator = SimpleNamespace(process_index=process, num_processes=plan.num_processes, device=torch.device("cpu"))
    return SimpleNamespace(
        config=config,
        plan=plan,
        accelerator=accelerator,
        model=policy.master,
        policy=policy,
        teacher=None,
        optimizer=torch.optim.SGD(policy.master.parameters()),
        learning_rate=lambda updates: 0.0,
        memory=OutOfMemoryRetry(60, policy),
    )


def _rollout(session: Any, silent: float) -> Rollout:
    """Long-tailed completions of random tokens."""
    rows = session.plan.generation_batch_size
    prompts = [torch.randint(3, 13, (length,)).tolist() for length in torch.randint(2, 10, (rows // G,)).tolist()]
    lengths = torch.exp(1.5 + torch.randn(rows)).long().clamp(1, LONGEST)
    inside = (torch.arange(int(lengths.max())) < lengths[:, None]).float()
    advantages = torch.randn(rows).masked_fill((torch.rand(rows // G) < silent).repeat_interleave(G), 0.0)
    return Rollout(
        index=0,
        scheduled_rows=list(range(rows // G)),
        prompt_ids=[prompts[row // G] for row in range(rows)],
        completion_ids=torch.randint(3, 13, inside.shape) * inside.long(),
        completion_mask=inside,
        completion_lengths=lengths,
        truncated=lengths == LONGEST,
        sampling_logprobs=torch.zeros_like(inside),
        advantages=advantages,
        sampled_completions=rows,
        sampled_tokens=int(lengths.sum()),
        sampled_rows=torch.arange(rows) // G,
        passed=torch.zeros(rows),
        metrics={},
        old_logprobs=None,
        ref_logprobs=None,
        keep=None,
    )


def test_an_update_without_a_gradient_reads_no_old_log_probabilities(policy: Policy) -> None:
    """None are computed for its completions."""
    torch.manual_seed(0)
    config, plan = _set_up({"gradient_accumulation_steps": 1, "num_iterations": 2}, 1)
    session = _session(policy, config, plan, 0)
    rollout = _rollout(session, silent=1.0)
    rollout = replace(rollout, old_logprobs=torch.full_like(rollout.sampling_logprobs, math.nan))
    metrics = update(session, update_batch([(rollout, 0)], plan, config), START)
    assert [name for name, value in metrics.items() if not math.isfinite(value)] == []


def test_each_roll_back_halves_the_learning_rate(policy: Policy) -> None:
    torch.manual_seed(0)
    config, plan = _set_up({"gradient_accumulation_steps": 1}, 1)
    session = _session(policy, config, plan, 0)
    session.learning_rate = lambda updates: 0.5
    batch = update_batch([(_rollout(session, silent=0.0), 0)], plan, config)
    rates = [update(session, batch, replace(START, roll_backs=number))["learning_rate"] for number in range(3)]
    assert rates == [0.5, 0.25, 0.125]
    assert session.optimizer.param_groups[0]["lr"] == 0.125


def test_an_update_has_the_same_rows_on_each_number_of_processes_and_each_is_computed_once(policy: Policy) -> None:
    options = {"gradient_accumulation_steps": 2, "steps_per_generation": 4}
    torch.manual_seed(0)
    config, plan = _set_up(options, 1)
    rollout = _rollout(_session(policy, config, plan, 0), 0.5)
    found = []
    for processes in (1, 2, 8):
        config, plan = _set_up(options, processes)
        batch = update_batch([(rollout, 2), (rollout, 3)], plan, config)
        parts = [own_rows(batch, config, process, processes, share_prompts=True) for process in range(processes)]
        rows = [
            (ids[:length].tolist(), float(advantage))
            for part in parts
            for ids, length, advantage in zip(
                part.sequences.input_ids, part.sequences.prompt_lengths, part.advantages, strict=True
            )
        ]
        found.append(sorted(rows))
    planned = training_order(plan, config.seed, 0)[2:4].flatten()
    trained = [(rollout.prompt_ids[row], float(rollout.advantages[row])) for row in planned]
    assert found == [sorted(row for row in trained if row[1])] * 3


def test_processes_without_rows_compute_one_that_counts_for_nothing(policy: Policy) -> None:
    config, plan = _set_up({"gradient_accumulation_steps": 1, "steps_per_generation": 1}, 8)
    rollout = _rollout(_session(policy, config, plan, 0), 0.0)
    order = training_order(plan, config.seed, 0)[0].flatten()
    for trained in ([5], []):
        advantages = torch.zeros_like(rollout.advantages)
        advantages[order[trained]] = 1.0
        batch = update_batch([(replace(rollout, advantages=advantages), 0)], plan, config)
        sessions = [_session(policy, config, plan, process) for process in range(8)]
        found = [gradient_and_metrics(session, batch, START) for session in sessions]
        tokens = [any((gradient != 0).any() for gradient in gradients) for gradients, _ in found]
        assert tokens == [bool(trained)] + [False] * 7
        assert ["entropy" in metrics for _, metrics in found] == [True] + [False] * 7


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_a_completion_is_computed_if_an_advantage_the_teacher_or_kl_teaches_it(policy: Policy, beta: float) -> None:
    torch.manual_seed(0)
    config, plan = _set_up({"beta": beta}, 1)
    config = config.model_copy(update={"teacher": TeacherConfig(template="{better}{prompt}")})
    rollout = _rollout(_session(policy, config, plan, 0), 0.5)
    shown = torch.arange(len(rollout.advantages)) % 3 == 0
    batch = update_batch([(replace(rollout, taught=shown.float()), 0)], plan, config)
    rows = own_rows(batch, config, 0, 1, share_prompts=True)
    planned = torch.from_numpy(training_order(plan, config.seed, 0)[[0]].flatten())
    expected = planned if beta else planned[shown[planned] | (rollout.advantages[planned] != 0)]
    assert len(expected) > 0
    assert sorted(rows.sequences.completion_lengths.tolist()) == sorted(rollout.completion_lengths[expected].tolist())
    assert len(planned[~shown[planned] & (rollout.advantages[planned] == 0)]), "some teach nothing"
