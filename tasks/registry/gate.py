"""The gate: decides whether a model version is better than the one in use and breaks no guard. Takes figures and
returns a verdict; does not access the registry."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import polars as pl

from grpo_core.config.evaluation import HELD_OUT, Guard, PromotionConfig
from grpo_core.config.run import RunConfig
from grpo_core.data.units import paired_units
from grpo_core.evaluation.outcomes import (
    bounds_of,
    deciding_metric,
    distinct_prompts,
    grouped,
    left_unscored,
    outcomes,
    prompt_numbers,
    rewards_in,
    samples_of,
    unit_name,
    unit_numbers,
)
from grpo_core.evaluation.statistics import Bounds, Difference, paired_difference
from tasks.rendering import figures

LEAST_COMPARED = 0.9  # share of a set's prompts; with fewer, the unscored ones could decide
LEAST_UNITS = 200  # to decide by an outcome of unknown range, see docs/explanation/evaluation.md


class NotComparableError(LookupError):
    """Raised if there is nothing to judge a version by. A forced promotion does not need it."""


@dataclass(frozen=True)
class Contestant:
    """A policy and its outcomes: the columns `policy/…` of an evaluation's samples. `label`: name in sentences."""

    label: str
    samples: pl.DataFrame
    policy: str


@dataclass(frozen=True)
class Comparison:
    """A metric of both contestants on a set, and the rule for it. `candidate`, `rival`: means over the compared
    units. `difference`: candidate minus rival, paired. `unit`: what it counts, prompts or groups of them."""

    set: str
    metric: str
    candidate: float
    rival: float
    difference: Difference
    bounds: Bounds
    unit: str
    num_prompts: int
    """Number of prompts in the set. Those on which the rival was not scored are not compared."""
    num_compared: int
    """Number of prompts that were compared."""
    num_unscored: int
    """Number of rows on which samples of the candidate count as the worst value, see `decide`."""
    rule: str = ""
    broken: str | None = None
    """Description of how the rule is broken, as part of a sentence; None if it is kept."""


@dataclass(frozen=True)
class Verdict:
    """Verdict of the gate. `comparisons`: first the metric in which the candidate has to be better, then the guards in
    order."""

    accepted: bool
    reason: str
    comparisons: tuple[Comparison, ...] = ()


def decide(
    config: RunConfig, candidate: Contestant, rival: Contestant, attempt: int = 1, num_before: int = 0
) -> Verdict:
    """Accept the candidate if it is better by the rules of `config.promotion` and breaks no guard.

    attempt: number of this comparison among all with the rival, from 1. Versions that were evaluated, but never tried,
    count too, since the candidate may have been chosen by their reports. num_before: number of versions that were
    evaluated on these prompts before it. "Better" means that the one-sided p-value of "not better in the mean" is at
    most `level_of` this attempt, and that the mean gain is at least `min_gain`. The levels of all
    attempts add up to 1 − confidence, so this bounds the probability of ever accepting any candidate that is no better
    than the rival; guards only refuse. A sample that a reward did not score counts as the worst value if the reward
    scored the rival on the same prompt. Raises ValueError for a guard on a metric that the samples lack.
    """
    rules, level = config.promotion, level_of(attempt, config.promotion.confidence)
    metric = rules.metric or deciding_metric(candidate.samples, config.accuracy_reward)
    found = _compare(config, candidate, rival, rules.set, metric, "lowest", level)
    gain = _held_to_gain(rules, found, level)
    guards = [_held_to_guard(guard, config, candidate, rival) for guard in rules.guards]
    comparisons = (gain, *guards)
    broken = [comparison.broken for comparison in comparisons if comparison.broken]
    p_value = figures.p_value(gain.difference.p_value)
    verdict = "; ".join(broken) if broken else f"better, p = {p_value}"
    kept = f"; guards kept: {len(guards)}" if guards and not broken else ""
    at = f"attempt {attempt} against {rival.label}"
    if num_before:
        at += f", with {num_before:,} version{'s' * (num_before > 1)} evaluated on these prompts before it"
    at += f", so at level {level:.2g}"
    return Verdict(not broken, f"{_found(gain, rival)}: {verdict}{kept} ({at})", comparisons)


def refuse_chosen_there(config: RunConfig, samples: pl.DataFrame) -> None:
    """Raises NotComparableError if the version is an arm of a sweep, and prompts that would judge it were also used to
    choose among the arms."""
    judged_on = config.promotion.set
    judging, choosing = (distinct_prompts(samples, name) for name in (judged_on, HELD_OUT))
    if config.registry.sweep and (shared := len(judging & choosing)):
        raise NotComparableError(
            f"it is an arm of the sweep {config.registry.sweep!r}, which chooses on {HELD_OUT!r}, and {shared:,} of "
            f"{len(judging):,} prompts of {judged_on!r} are among those: the best of several looks better there than "
            "it is. Judge it on other prompts: name a set in [[evaluation.sets]] by promotion.set"
        )


def level_of(attempt: int, confidence: float) -> float:
    """Level of the k-th test against the same rival, (1 − confidence) / (k · (k + 1)): over all k they add up to
    1 − confidence (alpha spending, as in Foster & Stine 2008)."""
    return (1 - confidence) / (attempt * (attempt + 1))


def _found(gain: Comparison, rival: Contestant) -> str:
    metric, compared = gain.metric, gain.num_compared
    candidate_has, rival_has = (figures.amount(metric, value) for value in (gain.candidate, gain.rival))
    found = f"{metric} on {gain.set} {candidate_has} against {rival_has} of {rival.label}, {_change(gain)}"
    if compared < gain.num_prompts:
        found += f" on {compared:,} of {gain.num_prompts:,} prompts"
    if gain.num_unscored:
        found += (
            f", with {gain.num_unscored:,} prompts counted as the worst because only {rival.label} was scored there"
        )
    return found


def _change(found: Comparison) -> str:
    """Write a gain with its interval, as part of a sentence; without interval if nothing could be compared."""
    difference = vars(found.difference)
    if not found.difference.num_units:
        return figures.gain(found.metric, difference)
    interval = f"{100 * found.difference.confidence:.3g}% interval {figures.interval(found.metric, difference)}"
    return f"{figures.gain(found.metric, difference)} ({interval})"


def _compare(
    config: RunConfig,
    candidate: Contestant,
    rival: Contestant,
    set: str,
    metric: str,
    worst: Literal["lowest", "highest"],
    level: float | None = None,
) -> Comparison:
    """Compare a metric on a set. `worst`: end of the metric's range that the candidate's unscored samples count as."""

    def outcomes_of(contestant: Contestant, unscored_as: pl.Series | None = None) -> np.ndarray:
        keys = (set, contestant.policy, metric, config.rewards, config.accuracy_reward)
        return outcomes(contestant.samples, *keys, unscored_as)

    before, after, bounds = outcomes_of(rival), outcomes_of(candidate), bounds_of(metric, config)
    names = rewards_in(metric, config)
    unscored = left_unscored(candidate.samples, candidate.policy, rival.samples, rival.policy, set, names)
    if unscored.any():
        end, outermost = (bounds[0], np.nanmin) if worst == "lowest" else (bounds[1], np.nanmax)
        end = end if math.isfinite(end) else float(outermost([*before, *after]))
        after = outcomes_of(candidate, pl.select(pl.when(unscored).then(end)).to_series())
    on_rows = ~(np.isnan(before) | np.isnan(after))
    samples = grouped(candidate.samples, rival.samples)
    before, after = paired_units(before, after, unit_numbers(samples, set))
    compared, prompts = ~np.isnan(before), prompt_numbers(samples, set)
    return Comparison(
        set,
        metric,
        _mean(after[compared]),
        _mean(before[compared]),
        paired_difference(before, after, config.promotion.confidence, bounds, level),
        bounds,
        unit=unit_name(samples),
        num_prompts=len(np.unique(prompts)),
        num_compared=len(np.unique(prompts[on_rows])),
        num_unscored=samples_of(candidate.samples, set)["row"].filter(unscored).n_unique(),
    )


def _held_to_gain(rules: PromotionConfig, gain: Comparison, level: float) -> Comparison:
    metric, found, broken = gain.metric, gain.difference, None
    least = figures.size(metric, rules.min_gain)
    if not found.num_units:
        broken = "no prompt was scored by both"
    elif undecided := _mostly_unscored(gain) or _too_few(gain):
        broken = undecided
    elif found.p_value > level:
        broken = (
            f"not shown to be better (p = {found.p_value:.2g}, and at most {level:.2g} is allowed; "
            f"{figures.power(metric, vars(found), gain.unit)})"
        )
    elif found.mean < rules.min_gain:
        broken = f"better, but min_gain asks for {least}"
    rule = f"better, p ≤ {level:.2g}" + (f", by {least}" if rules.min_gain else "")
    return replace(gain, rule=rule, broken=broken)


def _mostly_unscored(found: Comparison) -> str | None:
    """Return why the prompts scored for both do not represent their set, as part of a sentence; None if they do."""
    if found.num_compared >= LEAST_COMPARED * found.num_prompts:
        return None
    return (
        f"{found.metric} on {found.set} was scored for both on only {found.num_compared:,} of "
        f"{found.num_prompts:,} prompts, and a decision needs {LEAST_COMPARED:.0%} of them: make the "
        "reward score the others, then evaluate again with `grpo stage evaluate --run RUN --force` and "
        "`grpo stage register --run RUN`"
    )


def _too_few(found: Comparison) -> str | None:
    """Return why these prompts are too few for a decision, as part of a sentence; None if they are enough."""
    if found.difference.num_units >= LEAST_UNITS or all(map(math.isfinite, found.bounds)):
        return None
    return (
        f"{found.metric} has no bounds, and {found.difference.num_units:,} {found.unit} are too few to show rare large "
        f"losses: give the rewards a range or clip, or evaluate on {LEAST_UNITS} {found.unit} or more"
    )


def _held_to_guard(guard: Guard, config: RunConfig, candidate: Contestant, rival: Contestant) -> Comparison:
    below = _compare(config, candidate, rival, guard.set, guard.metric, "lowest")
    above = _compare(config, candidate, rival, guard.set, guard.metric, "highest") if below.num_unscored else below
    # If nothing was scored, the mean is NaN, which keeps no bound.
    keeps = {
        "max_drop": lambda bound: below.difference.low >= -bound,
        "max_rise": lambda bound: above.difference.high <= bound,
        "min": lambda bound: below.candidate >= bound,
        "max": lambda bound: above.candidate <= bound,
    }
    bounds = {name: bound for name in keeps if (bound := getattr(guard, name)) is not None}
    found = below if {"max_drop", "min"} & bounds.keys() else above
    exceeded = [f"{name} {bound:g}" for name, bound in bounds.items() if not keeps[name](bound)]
    if exceeded:
        values = f"{figures.amount(found.metric, found.candidate)}, a change of {_change(found)}"
        broken = f"the guard {' and '.join(exceeded)} is broken: {found.metric} on {found.set} is {values}"
    else:
        broken = _mostly_unscored(found)
        if {"max_drop", "max_rise"} & bounds.keys():
            broken = broken or _too_few(found)
    return replace(found, rule=", ".join(f"{name} {bound:g}" for name, bound in bounds.items()), broken=broken)


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else float("nan")
