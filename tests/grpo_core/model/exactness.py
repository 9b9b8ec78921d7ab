"""The gradient of an update, from the loop and from a plain padded float32 pass over all rows."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import torch
from torch import Tensor

from grpo_core.algorithm.losses import token_losses
from grpo_core.distributed import gather_if_sharded, shard_like
from grpo_core.rollout.collect import collect
from grpo_core.rollout.types import Rollout
from grpo_core.training import roll_out as rolling
from grpo_core.training.batch import MicroBatch, update_batch
from grpo_core.training.session import Session
from grpo_core.training.state import TrainingState
from grpo_core.training.update import update

START = TrainingState(tokens_per_pass=100)


def rollout_with(session: Session, advantages: Tensor) -> Rollout:
    """The first rollout as the loop makes it, except these advantages."""

    def collected(*arguments: object) -> object:
        rollout, *others = collect(*arguments)  # type: ignore[arg-type]
        return replace(rollout, advantages=advantages), *others

    with mock.patch.object(rolling, "collect", collected):
        return rolling.roll_out(session, 0, START)[0]


def first_update(session: Session, rollout: Rollout) -> MicroBatch:
    """The rows of the rollout's first update, over all processes."""
    parts = [(rollout, micro_step.slice) for micro_step in session.plan.micro_steps(0)]
    return update_batch(parts, session.plan, session.config)


def move(session: Session) -> None:
    """The policy a step away from the one that sampled, so that ratios are not 1; the same step in every process."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in session.model.parameters():
            parameter += shard_like(parameter, 3e-3 * torch.randn(parameter.shape))


def updating_gradient(session: Session, batch: MicroBatch) -> list[Tensor]:
    """The gradient that the optimizer steps with."""
    return gradient_and_metrics(session, batch)[0]


def gradient_and_metrics(
    session: Session, batch: MicroBatch, progress: TrainingState = START
) -> tuple[list[Tensor], dict[str, float]]:
    """The gradient that the optimizer steps with, and the update's metrics; the weights stay as they are."""
    found: list[Tensor] = []
    session.optimizer.step = lambda: found.extend(_gradients(session))  # type: ignore[method-assign]
    metrics = update(session, batch, progress)
    assert found
    return found, metrics


def plain_logprobs(session: Session, batch: MicroBatch) -> Tensor:
    """Log-probabilities of the completions' tokens: all rows at once, padded to the longest, all logits. (B, T)"""
    return _plain_pass(session, batch)[0]


def plain_entropy(session: Session, batch: MicroBatch) -> Tensor:
    """Mean entropy of the tokens in the policy term."""
    kept = batch.mask if batch.keep is None else batch.mask * batch.keep
    return (_plain_pass(session, batch)[1] * kept).sum() / kept.sum()


def _plain_pass(session: Session, batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the completions' tokens and entropies there, 2 × (B, T)."""
    sequences = batch.sequences
    logits = session.model(input_ids=sequences.input_ids).logits / session.config.rollout.temperature
    distribution = torch.distributions.Categorical(logits=logits[:, :-1])
    logprobs = distribution.log_prob(sequences.input_ids[:, 1:])
    columns = sequences.prompt_lengths[:, None] - 1 + torch.arange(batch.mask.shape[1])
    columns = columns.clamp(max=logprobs.shape[1] - 1)
    return logprobs.gather(1, columns), distribution.entropy().gather(1, columns)


def plain_loss(session: Session, batch: MicroBatch, logprobs: Tensor) -> Tensor:
    """Loss of all rows with these log-probabilities (B, T), without an entropy bonus."""
    losses = token_losses(
        logprobs,
        logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs,
        batch.mask,
        batch.advantages,
        session.config.algorithm,
        sampling_logprobs=batch.sampling_logprobs,
        ref_logprobs=batch.ref_logprobs,
        keep=batch.keep,
    )
    return (batch.weights * losses.loss).sum()


def plain_gradient(session: Session, batch: MicroBatch, entropy_coef: float = 0.0) -> list[Tensor]:
    """Gradient of all rows' loss in one pass, with an entropy bonus of this weight."""
    session.optimizer.zero_grad()
    loss = plain_loss(session, batch, plain_logprobs(session, batch))
    if entropy_coef:
        loss = loss - entropy_coef * plain_entropy(session, batch)
    loss.backward()
    gradients = _gradients(session)
    session.optimizer.zero_grad()
    return gradients


def distance(found: list[Tensor], expected: list[Tensor]) -> float:
    """Relative, of the whole gradient."""
    found_, expected_ = (torch.cat([g.flatten().double() for g in gradients]) for gradients in (found, expected))
    return float((found_ - expected_).norm() / expected_.norm())


def _gradients(session: Session) -> list[Tensor]:
    parameters = [p for group in session.optimizer.param_groups for p in group["params"]]
    return [torch.zeros(p.shape) if p.grad is None else gather_if_sharded(p.grad).clone() for p in parameters]
