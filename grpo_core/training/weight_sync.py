"""Weights from trainer to engine, verified: the engine compares each tensor's checksum with the trainer's
(`rollout.checksums`), and after each sync both compute log-probabilities of the same probe batch."""

from __future__ import annotations

import torch

from grpo_core.distributed import failing_together, maxima_over_processes
from grpo_core.errors import EngineError, NotFiniteError, RolloutError, TrainingError
from grpo_core.model.sequences import Sequences, pad
from grpo_core.system.progress import phase
from grpo_core.training.session import Sampler, Session
from grpo_core.training.state import TrainingState
from grpo_core.training.sync_probe import Probe, Scores


def begin_probing(session: Session, sampler: Sampler) -> None:
    """Score the probe while engine and trainer both have the base's weights: how far they differ then is rounding, and
    bounds how far they may differ later. At a resumed start, too, they have the base's weights first.

    Raises TrainingError on every process if one finds a difference too large for rounding.
    """
    probe, scores = sampler.probe, probe_logprobs(session, sampler)
    if not scores.trainer.isfinite().all():
        raise TrainingError("before the first update: the base model's log-probabilities are not finite")
    probe.compare(scores)
    (probe.first_drift,) = _largest(session, scores.drift)
    if probe.first_drift > probe.first_bound:
        raise TrainingError(
            "before the first update: the engine's log-probabilities of the probe batch are "
            f"{probe.first_drift:.3g} away from the trainer's, with the base's weights on both sides; at most "
            f"{probe.first_bound:g} is allowed (rollout.max_sync_drift). The engine has another model or computes in "
            "another precision; try rollout.engine = 'transformers' to see whether the engine is the cause"
        )


@phase("weight sync")
def sync_weights(session: Session, sampler: Sampler, state: TrainingState) -> float:
    """Hand the policy's weights to the engine. Returns the mean |difference| of the probe's log-probabilities.

    Raises on every process: EngineError if one finds that weights did not arrive; TrainingError if one finds that its
    engine would sample from another policy than the one that is trained: too far from it, unchanged although the policy
    has moved, or lagging behind it.
    """
    probe = sampler.probe
    session.policy.refresh()
    with failing_together(kind=EngineError):
        how = sampler.engine.sync_weights(session.policy.model)
    scores = probe_logprobs(session, sampler)
    if not scores.trainer.isfinite().all():
        raise NotFiniteError(f"after step {state.updates}: the policy's log-probabilities are not finite")
    drift, unfollowed, lag = _largest(session, scores.drift, *probe.compare(scores))
    if drift > probe.bound:
        problem = f"are {drift:.3g} away from the trainer's, the bound is {probe.bound:g} (rollout.max_sync_drift)"
    elif unfollowed:
        problem = f"have not changed at all, while the trainer's have moved by {unfollowed:.3g}"
    elif lag > 1 and probe.own_bound is None:
        problem = (
            f"are {drift:.3g} away from the trainer's and have come apart {lag:.1f} times as far as rounding explains "
            "(to allow it, set rollout.max_sync_drift: that bound alone then decides)"
        )
    else:
        if how != probe.handover and session.accelerator.is_main_process:
            print(f"training: weights reach the engine: {how} (drift {drift:.2g}, bound {probe.bound:.2g})", flush=True)
        probe.handover = how
        return drift
    raise TrainingError(
        f"after step {state.updates}: the engine's log-probabilities of the probe batch {problem}: the engine does "
        "not have the trainer's weights, or computes in another precision. The last checkpoint is intact; try "
        "rollout.engine = 'transformers' to see whether the engine is the cause"
    )


def probe_logprobs(session: Session, sampler: Sampler) -> Scores:
    """Log-probabilities of the probe batch, by the trainer and by the engine, with the weights that each has."""
    probe = sampler.probe
    with failing_together(kind=RolloutError):
        engine = sampler.engine.compute_logprobs(probe.sequences)
    lengths = [len(said) for said in probe.continuations] * (len(engine) // len(probe.continuations))
    scored = [value for row, n in zip(engine, lengths, strict=True) for value in row[-n:]]
    trainer = torch.cat([row[:n] for row, n in zip(_trainer_logprobs(session, probe), lengths, strict=False)])
    return Scores(trainer, torch.tensor(scored).view(-1, len(trainer)))


@torch.no_grad()
def _trainer_logprobs(session: Session, probe: Probe) -> torch.Tensor:
    """Return the trainer's log-probabilities of the probe's continued tokens, at temperature 1. (B, T) on the CPU"""
    contexts, said = probe.contexts, probe.continuations
    batch = Sequences(
        input_ids=pad(probe.sequences, torch.int64),
        prompt_lengths=torch.tensor([*map(len, contexts)]),
        completion_lengths=torch.tensor([*map(len, said)]),
        prompt_of=torch.arange(len(contexts)),
    )
    policy = session.policy.whole(1.0)
    logprobs, _ = policy(policy.prepare(batch))
    return logprobs.cpu()


def _largest(session: Session, *values: float) -> list[float]:
    """Return each value's maximum over the processes."""
    return maxima_over_processes(torch.tensor(values, device=session.accelerator.device)).tolist()
