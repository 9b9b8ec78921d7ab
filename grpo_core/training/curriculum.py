"""What a curriculum does to a training: which epochs are arranged when, and what is said of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from grpo_core.config.run import RunConfig
from grpo_core.data.curriculum import PassRates, arrange, distance, known_batches
from grpo_core.data.order import epoch_rows
from grpo_core.planning.sampling_ahead import batches_ahead
from grpo_core.training.session import Session
from grpo_core.training.state import TrainingState


def arrange_epochs(session: Session, state: TrainingState) -> TrainingState:
    """The state with the epochs arranged whose rates are now known, see `known_batches`, without those that are over.

    What the state holds is not arranged again: a training that was rolled back or goes on takes the same prompts.
    """
    if state.arranged is None:
        return state
    config, plan, rates = session.config, session.plan, state.rates
    assert rates is not None
    newest = max(state.rollouts - 1, 0) // plan.rollouts_per_epoch  # its last batch may be sampled again
    arranged = {epoch: rows for epoch, rows in state.arranged.items() if epoch >= newest}
    epoch, last = max(state.arranged, default=-1) + 1, (plan.rollouts - 1) // plan.rollouts_per_epoch
    ahead = batches_ahead(config.rollout.max_staleness)
    while epoch <= last and known_batches(plan, epoch, ahead) <= state.rollouts:
        rows = epoch_rows(plan, config.seed, epoch)
        arranged[epoch] = arrange(rows, rates, config.data.curriculum, plan, config.seed, epoch)
        if session.accelerator.is_main_process:
            print(f"training: epoch {epoch + 1} takes {describe(rates, arranged[epoch], config)}", flush=True)
        epoch += 1
    return replace(state, arranged=arranged)


def describe(rates: PassRates, rows: np.ndarray, config: RunConfig) -> str:
    """What an epoch takes, and what it leaves out, as the end of a sentence."""
    taken, size = len(np.unique(rows)), len(rates.passed)
    if not rates.known.any():
        return f"{taken:,} of {size:,} prompts in random order: no pass rate is known yet"
    known = rows[rates.known[rows]]
    said = f"{taken:,} of {size:,} prompts"
    if len(known):
        said += f", mean pass rate {rates.rate[known].mean():.0%}"
    if band := config.data.curriculum.band:
        below, above = (rates.rate < band[0]).sum(), (rates.rate > band[1]).sum()
        said += f"; {below:,} have a pass rate below {band[0]:g}, {above:,} above {band[1]:g}"
    return said


def curriculum_metrics(session: Session, state: TrainingState, index: int) -> dict[str, float]:
    """Figures of a curriculum when generation batch `index` is sampled; none without one."""
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
