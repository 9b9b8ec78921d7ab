"""State of a training beside weights and optimizer: what the next update depends on, and what the result reports."""

from __future__ import annotations

import math
import random
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grpo_core.data.curriculum import PassRates, with_samples
from grpo_core.data.order import Group
from grpo_core.planning.plan import Plan
from grpo_core.rollout.types import Rollout


@dataclass(frozen=True)
class TrainingState:
    """State after `updates` optimizer updates, counted over all starts of the run."""

    updates: int = 0
    tokens_per_pass: int | None = None  # of a forward pass, at most, after memory has run out; None if it has not
    rollout: Rollout | None = None  # the generation batch in use
    taken: list[Group] = field(default_factory=list)  # the groups of that batch
    begun: list[Group] = field(default_factory=list)  # groups sampled ahead, for later batches
    rates: PassRates | None = None  # of the completions so far; None if no reward tells what passes
    arranged: dict[int, np.ndarray] | None = None  # rows of epochs by a curriculum, see data.order; None without one
    unrecorded: dict[str, float] | None = None  # metrics of the last update until its evaluation is complete
    # What happened, to be compared with the plan.
    rollouts: int = 0
    prompts_seen: int = 0
    prompts_dropped: int = 0
    seen_in_epoch: frozenset[int] = frozenset()
    completions: int = 0
    sampled_completions: int = 0
    sampled_tokens: int = 0
    num_tokens: int = 0  # prompts and completions trained on
    train_seconds: float = 0.0
    # Controllers and verdicts.
    entropy_coef: float = 0.0
    last_entropy: float = math.inf
    streaks: dict[str, int] = field(default_factory=dict)  # updates in a row that each health limit was broken
    roll_backs: int = 0
    max_staleness: int = 0  # rollout.max_staleness, or what health limits have lowered it to
    best_step: int | None = None
    best_value: float = -math.inf
    evaluations_without_gain: int = 0
    stopped_early: bool = False

    def with_rollout(self, rollout: Rollout, plan: Plan) -> TrainingState:
        """Return the state after a generation batch was sampled.

        A batch that is sampled again, after a roll-back to a place between its updates, is counted once.
        """
        if rollout.index < self.rollouts and self.rollout is None:
            return replace(self, rollout=rollout)
        new = set(rollout.scheduled_rows) - self.seen_in_epoch
        seen = self.seen_in_epoch | new
        turns, left = len(new), plan.num_prompts - len(seen)
        if self.arranged is not None:  # which may give a prompt several turns
            turns, left = len(rollout.scheduled_rows), plan.dropped_prompts_per_epoch
        epoch_ends = (rollout.index + 1) % plan.rollouts_per_epoch == 0
        prompt_tokens = sum(map(len, rollout.prompt_ids))
        return replace(
            self,
            rollout=rollout,
            rollouts=self.rollouts + 1,
            rates=self.rates
            and with_samples(self.rates, rollout.sampled_rows.numpy(), rollout.passed.numpy(), self.updates + 1),
            prompts_seen=self.prompts_seen + turns,
            prompts_dropped=self.prompts_dropped + (left if epoch_ends else 0),
            seen_in_epoch=frozenset() if epoch_ends else seen,
            completions=self.completions + len(rollout.prompt_ids),
            sampled_completions=self.sampled_completions + rollout.sampled_completions,
            sampled_tokens=self.sampled_tokens + rollout.sampled_tokens,
            num_tokens=self.num_tokens + prompt_tokens + int(rollout.completion_lengths.sum()),
        )

    def with_update(self, seconds: float, tokens_per_pass: int | None) -> TrainingState:
        """Return the state after an optimizer update."""
        total = self.train_seconds + seconds
        return replace(self, updates=self.updates + 1, train_seconds=total, tokens_per_pass=tokens_per_pass)

    def with_evaluation(
        self, metrics: dict[str, float], value: float, threshold: float, patience: int | None
    ) -> TrainingState:
        """Return the state after an evaluation: a new best, or one evaluation nearer to the end of patience.

        `value`: the metric that the best is chosen by.
        """
        gained = value > self.best_value + threshold
        waited = 0 if gained else self.evaluations_without_gain + 1
        is_best = value > self.best_value
        return replace(
            self,
            best_step=self.updates if is_best else self.best_step,
            best_value=max(value, self.best_value),
            evaluations_without_gain=waited,
            unrecorded={**(self.unrecorded or {}), **metrics},
            stopped_early=patience is not None and waited >= patience,
        )

    @property
    def recorded(self) -> int:
        """Number of updates whose metrics are complete: all, except the last until its evaluation is complete."""
        return self.updates - (self.unrecorded is not None)

    def is_done(self, plan: Plan) -> bool:
        """True if every update of the plan is made and recorded, or the training has stopped early."""
        return self.unrecorded is None and (self.updates >= plan.max_steps or self.stopped_early)

    @property
    def counts(self) -> dict[str, int]:
        """Counts of what happened, by the names of `Plan.counts`."""
        return {
            "updates": self.updates,
            "rollouts": self.rollouts,
            "prompts_seen": self.prompts_seen,
            "prompts_dropped": self.prompts_dropped,
            "completions": self.completions,
        }


def saved_fields(state: TrainingState) -> dict[str, Any]:
    """Return the state as plain values and tensors, for a checkpoint."""
    arrays = (
        {} if state.rates is None else {name: torch.from_numpy(values) for name, values in vars(state.rates).items()}
    )
    return {
        **asdict(replace(state, rates=None, arranged=None)),
        "seen_in_epoch": sorted(state.seen_in_epoch),
        "rates": arrays or None,
        "arranged": state.arranged and {epoch: torch.from_numpy(rows) for epoch, rows in state.arranged.items()},
    }


def restored_state(fields: dict[str, Any]) -> TrainingState:
    """Return the state that `saved_fields` has saved, with tensors in memory, not in a file that will be deleted."""
    rollout, rates, arranged = (fields[name] for name in ("rollout", "rates", "arranged"))
    held: dict[str, Any] = {
        "rollout": rollout and Rollout(**{name: _in_memory(value) for name, value in rollout.items()}),
        "rates": rates and PassRates(**{name: value.clone().numpy() for name, value in rates.items()}),
        "arranged": arranged and {epoch: rows.clone().numpy() for epoch, rows in arranged.items()},
        "seen_in_epoch": frozenset(fields["seen_in_epoch"]),
    }
    return TrainingState(**(fields | held))


def _in_memory(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def random_state() -> dict[str, Any]:
    """State of the global generators of Python, NumPy and torch, as plain data and tensors."""
    version, numbers, gauss = random.getstate()
    numpy_state = np.random.get_state(legacy=False)
    return {
        "python": (version, numbers, gauss),
        "numpy": {**numpy_state, "state": {**numpy_state["state"], "key": numpy_state["state"]["key"].tolist()}},
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all(),
    }


def set_random_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    key = np.array(state["numpy"]["state"]["key"], dtype=np.uint32)
    np.random.set_state({**state["numpy"], "state": {**state["numpy"]["state"], "key": key}})
    torch.set_rng_state(state["torch"])
    if len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
