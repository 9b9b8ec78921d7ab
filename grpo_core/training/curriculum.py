"""A curriculum in a training: when epochs are arranged, and the metrics."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from grpo_core.data.curriculum import arrange, describe, distance, known_batches
from grpo_core.data.order import epoch_rows
from grpo_core.planning.sampling_ahead import batches_ahead
from grpo_core.training.session import Session
from grpo_core.training.state import TrainingState


def arrange_epochs(session: Session, state: TrainingState) -> TrainingState:
    """Arrange the epochs whose rates are now known, see `known_batches`, and drop those that are over.

    Epochs in the state are not arranged again: a training that was rolled back or resumed takes the same prompts.
    """
    if state.arranged is None:
        return state
    keys, seed, plan, rates = session.config.data.curriculum, session.config.seed, session.plan, state.rates
    assert rates is not None
    newest = max(state.rollouts - 1, 0) // plan.rollouts_per_epoch  # its last batch may be sampled again
    arranged = {epoch: rows for epoch, rows in state.arranged.items() if epoch >= newest}
    epoch, last = max(state.arranged, default=-1) + 1, (plan.rollouts - 1) // plan.rollouts_per_epoch
    ahead = batches_ahead(session.config.rollout.max_staleness)
    while epoch <= last and known_batches(plan, epoch, ahead) <= state.rollouts:
        arranged[epoch] = arrange(epoch_rows(plan, seed, epoch), rates, keys, plan, seed, epoch)
        if session.accelerator.is_main_process:
            print(f"training: epoch {epoch + 1} takes {describe(rates, arranged[epoch], keys, plan)}", flush=True)
        epoch += 1
    return replace(state, arranged=arranged)


def curriculum_metrics(session: Session, state: TrainingState, index: int) -> dict[str, float]:
    """Metrics of a curriculum when generation batch `index` is sampled; empty without one."""
    if state.arranged is None or state.rates is None:
        return {}
    keys, rates = session.config.data.curriculum, state.rates
    taken = np.unique(state.arranged[index // session.plan.rollouts_per_epoch])
    found = {"curriculum/taken": len(taken) / len(rates.passed), "curriculum/known": rates.known.mean().item()}
    if rates.known.any():
        found["curriculum/pass_rate"] = np.nanmean(rates.rate).item()
        if keys.kind == "band":
            found["curriculum/in_band"] = (distance(rates, keys)[rates.known] == 0).mean().item()
    return found
