"""An update's gradient is that of one plain pass over all its rows, over however many processes they are divided."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from accelerate.state import AcceleratorState
from torch import Tensor

from grpo_core.algorithm.losses import token_losses
from grpo_core.config.files import parse_config
from grpo_core.config.losses import LossType
from grpo_core.config.run import RunConfig
from grpo_core.data.order import training_order
from grpo_core.model.loading import load_model
from grpo_core.model.policy import Policy
from grpo_core.planning.plan import Plan, make_plan, plan_inputs
from grpo_core.rollout.types import Rollout
from grpo_core.training.batch import MicroBatch, join, own_rows, update_batch
from grpo_core.training.out_of_memory import OutOfMemoryRetry
from grpo_core.training.state import TrainingState
from grpo_core.training.update import update
from tests.conftest import config_values
from tests.grpo_core.algorithm.plain_losses import Cut, plain
from tests.grpo_core.model.exactness import _plain_pass, distance, gradient_and_metrics

BOUND = 2e-6  # relative, of a sum over eight processes
MICRO_STEP = 16  # completions of all processes
G = 4
LONGEST = 24
START = TrainingState(tokens_per_pass=100)


@pytest.fixture
def policy(smooth_model_folder: Path) -> Iterator[Policy]:
    yield Policy(load_model(smooth_model_folder), 0.9)
    AcceleratorState._reset_state(reset_partial_state=True)


def _options(loss_type: LossType, draw: random.Random) -> dict[str, Any]:
    micro_steps = draw.choice([1, 2, 3])
    return {
        "loss_type": loss_type,
        "gradient_accumulation_steps": micro_steps,
        "steps_per_generation": draw.choice([1, 2]) * micro_steps,
        "num_iterations": draw.choice([1, 2]),
        "beta": draw.choice([0.0, 0.1]),
        "entropy_coef": draw.choice([0.0, 0.3]),
        "top_entropy_quantile": draw.choice([1.0, 0.5]),
        "mask_truncated_completions": draw.choice([False, True]),
        **plain(loss_type).needs,
    }


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
        optimizer=torch.optim.SGD(policy.master.parameters()),
        learning_rate=lambda updates: 0.0,
        memory=OutOfMemoryRetry(60, policy),
    )


def _rollout(session: Any, silent: float) -> Rollout:
    """Long-tailed completions of random tokens; log-probabilities not far from the policy's."""
    config, plan = session.config, session.plan
    rows = plan.generation_batch_size
    prompts = [torch.randint(3, 13, (length,)).tolist() for length in torch.randint(2, 10, (rows // G,)).tolist()]
    lengths = torch.exp(1.5 + torch.randn(rows)).long().clamp(1, LONGEST)
    inside = (torch.arange(int(lengths.max())) < lengths[:, None]).float()
    truncated = lengths == LONGEST
    mask = inside * ~truncated[:, None] if config.algorithm.mask_truncated_completions else inside
    advantages = torch.randn(rows).masked_fill((torch.rand(rows // G) < silent).repeat_interleave(G), 0.0)
    rollout = Rollout(
        index=0,
        scheduled_rows=list(range(rows // G)),
        prompt_ids=[prompts[row // G] for row in range(rows)],
        completion_ids=torch.randint(3, 13, inside.shape) * inside.long(),
        completion_mask=mask,
        completion_lengths=lengths,
        truncated=truncated,
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
    sequences = join(rollout, list(range(rows)))
    with torch.no_grad():
        logprobs, _ = _plain_pass(session, SimpleNamespace(sequences=sequences, mask=inside))  # type: ignore[arg-type]

    def near(by: float) -> Tensor:
        return (logprobs + by * torch.randn_like(logprobs)) * inside

    return replace(
        rollout,
        sampling_logprobs=near(0.05),
        old_logprobs=None if plan.on_policy else near(0.2),
        ref_logprobs=near(0.3) if config.algorithm.beta else None,
        keep=(torch.rand_like(inside) < 0.5) * mask if config.algorithm.top_entropy_quantile < 1 else None,
    )


def _normalisers(rollout: Rollout, plan: Plan, config: RunConfig) -> Tensor:
    """What a token's loss in each row of the first update is divided by, as docs/reference/algorithm.md says."""
    lengths = rollout.completion_mask.sum(1).int()
    order = torch.from_numpy(training_order(plan, config.seed, 0))[: plan.gradient_accumulation_steps]  # (A, W, b)
    common = (order.shape[0], int(lengths.sum()), plan.steps_per_generation, plan.num_processes, LONGEST)
    return torch.tensor(
        [
            plain(config.algorithm.loss_type).divisor(Cut(length, sum(of_micro_step), order.shape[2], *common))
            * plan.num_processes
            for of_micro_step in lengths[order].flatten(0, 1).tolist()
            for length in of_micro_step
        ]
    )


def _plain_gradient(session: Any, rollout: Rollout, batch: MicroBatch) -> list[Tensor]:
    """Gradient of the mean loss over the processes, computed from all rows together."""
    config, plan = session.config, session.plan
    logprobs, entropy = _plain_pass(session, batch)
    losses = token_losses(
        logprobs,
        logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs,
        batch.mask,
        batch.advantages,
        config.algorithm,
        sampling_logprobs=batch.sampling_logprobs,
        ref_logprobs=batch.ref_logprobs,
        keep=batch.keep,
    )
    loss = (batch.mask * losses.loss / _normalisers(rollout, plan, config)[:, None]).sum()
    kept = batch.mask if batch.keep is None else batch.mask * batch.keep
    of_rollout = rollout.completion_mask if rollout.keep is None else rollout.completion_mask * rollout.keep
    share = plan.gradient_accumulation_steps / plan.steps_per_generation
    loss = loss - config.algorithm.entropy_coef * (kept * entropy).sum() / (of_rollout.sum() * share)
    parameters = [*session.model.parameters()]
    return [*torch.autograd.grad(loss, parameters)]


@pytest.mark.slow
@pytest.mark.parametrize("packs", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("loss_type", get_args(LossType))
def test_the_gradient_over_processes_is_the_plain_one(policy: Policy, loss_type: LossType, packs: bool) -> None:
    policy.packs = packs
    draw = random.Random(f"{loss_type} {packs}")
    options, silent = _options(loss_type, draw), draw.choice([0.0, 0.5, 0.9])
    for processes in (1, 2, 8):
        config, plan = _set_up(options, processes)
        sessions = [_session(policy, config, plan, process) for process in range(processes)]
        torch.manual_seed(0)
        rollout = _rollout(sessions[0], silent)
        parts = [(rollout, micro_step.slice) for micro_step in plan.micro_steps(0)]
        batch = update_batch(parts, plan, config)
        expected = _plain_gradient(sessions[0], rollout, batch)
        found = [gradient_and_metrics(session, batch, START)[0] for session in sessions]
        mean = [torch.stack(gradients).sum(0) / processes for gradients in zip(*found, strict=True)]
        if math.isclose(sum(float(g.norm()) for g in expected), 0.0, abs_tol=1e-12):
            assert all((gradient == 0).all() for gradient in mean)
        else:
            assert distance(mean, expected) < BOUND, (options, silent, processes)


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
        parts = [
            own_rows(batch, process, processes, without_advantage=False, share_prompts=True)
            for process in range(processes)
        ]
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
