"""The trials of a search (`grpo sweep --optuna`): values that Optuna proposes from the outcomes of the trials before,
kept in the sweep's folder, so that a killed sweep continues with the same ones."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from grpo_core.errors import GrpoError
from tasks.stages.arms import sweep_folder
from tasks.stages.files import read_json, write_text

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

TRIALS = "trials.json"  # in the sweep's folder: `space`, and `trials`, the values of each by key
AT_RANDOM = 5  # trials with an outcome, before the sampler uses outcomes
DIGITS = 4  # of a proposed number
TRIES = 1000  # proposals, until one is new


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`, both included; `log`: evenly spread on a logarithmic scale; `whole`: integers."""

    low: float
    high: float
    log: bool = False
    whole: bool = False

    @property
    def count(self) -> float:
        """Count of the numbers in the range; infinite unless they are integers."""
        return self.high - self.low + 1 if self.whole else math.inf


Space = Mapping[str, Range | Sequence[Any]]  # by key, a range or the values to choose from


def read_trials(sweep: str) -> list[dict[str, Any]]:
    """Read the values of each trial, by key."""
    return read_json(sweep_folder(sweep) / TRIALS).get("trials", [])


def is_other_space(sweep: str, space: Space) -> bool:
    """True if the sweep has trials of another space."""
    there = read_json(sweep_folder(sweep) / TRIALS)
    return bool(there) and there["space"] != _as_json(space)


def add_trial(sweep: str, space: Space, seed: int, outcomes: Sequence[float | None]) -> dict[str, Any]:
    """Add a trial to the sweep and return its values. `outcomes`: of the trials before, None for a trial without one.

    The proposal depends only on the space, the seed, and the trials before. Raises GrpoError if nothing new is
    proposed.
    """
    trials = read_trials(sweep)
    values = _propose(space, seed + len(trials), trials, outcomes)
    kept = {"space": _as_json(space), "trials": [*trials, values]}
    write_text(sweep_folder(sweep) / TRIALS, json.dumps(kept, indent=2) + "\n")
    return values


def _propose(
    space: Space, seed: int, trials: Sequence[Mapping[str, Any]], outcomes: Sequence[float | None]
) -> dict[str, Any]:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    distributions = {key: _distribution(of_key) for key, of_key in space.items()}
    # A sampler started from the same seed repeats its first proposals, so each trial has a seed of its own.
    sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=AT_RANDOM)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    for values, outcome in zip(trials, outcomes, strict=True):
        if outcome is not None:
            asked = {key: _to_optuna(space[key], value) for key, value in values.items()}
            study.add_trial(optuna.create_trial(params=asked, distributions=distributions, value=outcome))
    for _ in range(TRIES):
        asked = study.ask(distributions).params
        values = {key: _from_optuna(of_key, asked[key]) for key, of_key in space.items()}
        if values not in trials:
            return values
    raise GrpoError(f"all of {TRIES:,} proposals repeated one of the {len(trials)} trials; give wider ranges")


def _distribution(of_key: Range | Sequence[Any]) -> BaseDistribution:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if not isinstance(of_key, Range):
        return CategoricalDistribution(range(len(of_key)))  # indices, since values may be lists and tables
    if of_key.whole:
        return IntDistribution(int(of_key.low), int(of_key.high), log=of_key.log)
    return FloatDistribution(of_key.low, of_key.high, log=of_key.log)


def _from_optuna(of_key: Range | Sequence[Any], asked: Any) -> Any:
    """Convert Optuna's parameter to the key's value. A number is rounded, to keep names and tables readable."""
    if not isinstance(of_key, Range):
        return of_key[asked]
    return asked if of_key.whole else min(max(float(f"{asked:.{DIGITS}g}"), of_key.low), of_key.high)


def _to_optuna(of_key: Range | Sequence[Any], value: Any) -> Any:
    """Convert a key's value to Optuna's parameter."""
    return value if isinstance(of_key, Range) else [*of_key].index(value)


def _as_json(space: Space) -> dict[str, Any]:
    return {key: asdict(of_key) if isinstance(of_key, Range) else [*of_key] for key, of_key in space.items()}
