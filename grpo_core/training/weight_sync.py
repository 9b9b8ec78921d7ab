"""Weights from trainer to engine, verified: after each sync both compute log-probabilities of the same probe batch."""

from __future__ import annotations

import torch

from grpo_core.distributed import largest
from grpo_core.errors import NotFiniteError, TrainingError
from grpo_core.model.sequences import Sequences, pad
from grpo_core.training.probe import Scores
from grpo_core.training.session import Session
from grpo_core.training.state import TrainingState

DRIFT_BOUND = {"no": 1e-3, "bf16": 0.1}  # by mixed_precision; vLLM on a million parameters stays below 2e-6 and 0.022


def sync_weights(session: Session, state: TrainingState) -> float:
    """Hand the policy's weights to the engine; the mean |difference| of both sides' log-probabilities of the probe.

    Raises TrainingError on every process if one finds that its engine would sample from another policy than the one
    that is trained: too far from it, unchanged although the policy has moved, or lagging behind it.
    """
    session.policy.refresh()
    session.engine.sync_weights(session.policy.model)
    scores = probe_logprobs(session)
    if not scores.trainer.isfinite().all():
        raise NotFiniteError(f"after step {state.updates}: the policy's log-probabilities are not finite")
    found = torch.tensor([scores.drift, *session.probe.compare(scores)], device=session.accelerator.device)
    drift, unfollowed, lag = largest(found).tolist()
    own_bound = session.config.rollout.max_sync_drift
    bound = own_bound or DRIFT_BOUND[session.config.train.mixed_precision]
    if drift > bound:
        problem = f"are {drift:.3g} away from the trainer's, the bound is {bound:g} (rollout.max_sync_drift)"
    elif unfollowed:
        problem = f"have not changed at all, while the trainer's have moved by {unfollowed:.3g}"
    elif lag > 1 and own_bound is None:
        problem = (
            f"are {drift:.3g} away from the trainer's and have come apart {lag:.1f} times as far as rounding explains "
            "(to allow it, set rollout.max_sync_drift: that bound alone then decides)"
        )
    else:
        return drift
    raise TrainingError(
        f"after step {state.updates}: the engine's log-probabilities of the probe batch {problem}: the engine does "
        "not have the trainer's weights, or computes in another precision. The last checkpoint is intact; try "
        "rollout.engine = 'transformers' to see whether the engine is the cause"
    )


def probe_logprobs(session: Session) -> Scores:
    """Log-probabilities of the probe batch, by the trainer and by the engine, with the weights that each has."""
    sequences = session.probe.sequences
    trainer = torch.cat(
        [row[: len(ids) - 1] for row, ids in zip(_trainer_logprobs(session, sequences), sequences, strict=True)]
    )
    engine = torch.tensor([value for row in session.engine.compute_logprobs(sequences) for value in row])
    return Scores(trainer, engine.view(-1, len(trainer)))


@torch.no_grad()
def _trainer_logprobs(session: Session, sequences: list[list[int]]) -> torch.Tensor:
    """The trainer's log-probability of each token but the first, at temperature 1. (B, L - 1) on the CPU"""
    ids, firsts = pad(sequences, torch.int64), torch.ones(len(sequences), dtype=torch.int64)
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    batch = Sequences(ids, firsts, lengths - 1, prompt_of=ids[:, 0])
    policy = session.policy.at(1.0)
    logprobs, _ = policy(policy.prepare(batch))
    return logprobs.cpu()
