"""The gate: whether a model version is better than what is in use, and breaks no guard. Figures in, verdict out; knows
no registry."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import polars as pl

from grpo_core.config import RunConfig
from grpo_core.evaluation_sections import Guard, PromotionConfig
from grpo_core.outcomes import outcomes
from grpo_core.statistics import POWER, Difference, paired_difference
from tasks import figures


@dataclass(frozen=True)
class Contestant:
    """A policy and what it did: columns `policy/…` of an evaluation's samples. `label`: what people call it."""

    label: str
    samples: pl.DataFrame
    policy: str


@dataclass(frozen=True)
class Comparison:
    """A metric on a set, of both, and the rule it was held against. `difference`: candidate minus rival, paired."""

    set: str
    metric: str
    candidate: float
    rival: float
    difference: Difference
    rule: str = ""
    broken: str | None = None
    """How the rule is broken, as part of a sentence; None where it holds."""


@dataclass(frozen=True)
class Verdict:
    """`comparisons`: first what the candidate has to be better in, then the guards in their order."""

    accepted: bool
    reason: str
    comparisons: tuple[Comparison, ...] = ()


def decide(config: RunConfig, candidate: Contestant, rival: Contestant) -> Verdict:
    """Accepted when the candidate is better by the rules of `config.promotion`, and no guard is broken.

    Better: one-sided p-value of "not better" at most 1 − confidence, and a mean gain of at least `min_gain`. Of
    candidates that are no better than their rival, at most a share of 1 − confidence is accepted, guards or not: a
    guard only ever refuses. ValueError for a guard on a metric that the samples do not have.
    """
    rules = config.promotion
    gain = _held_to_gain(rules, _compare(config, candidate, rival, rules.set, rules.metric))
    guards = [_held_to_guard(it, _compare(config, candidate, rival, it.set, it.metric)) for it in rules.guards]
    comparisons = (gain, *guards)
    candidate_has, rival_has = (figures.amount(gain.metric, value) for value in (gain.candidate, gain.rival))
    values = f"{candidate_has} against {rival_has} of {rival.label}"
    found = f"{gain.metric} on {gain.set} {values}, {_change(gain)}"
    if broken := [comparison.broken for comparison in comparisons if comparison.broken]:
        return Verdict(False, f"{found}: {'; '.join(broken)}", comparisons)
    kept = f"; guards kept: {len(guards)}" if guards else ""
    p_value = figures.p_value(gain.difference.p_value)
    return Verdict(True, f"{found}: better, p = {p_value}{kept}", comparisons)


def _change(found: Comparison) -> str:
    """A gain with its interval, as part of a sentence."""
    difference = vars(found.difference)
    interval = f"{100 * found.difference.confidence:.3g}% interval {figures.interval(found.metric, difference)}"
    return f"{figures.gain(found.metric, difference)} ({interval})"


def _compare(config: RunConfig, candidate: Contestant, rival: Contestant, set: str, metric: str) -> Comparison:
    before, after = (_outcomes(config, contestant, set, metric) for contestant in (rival, candidate))
    resamples, seed = config.evaluation.bootstrap_resamples, config.seed
    difference = paired_difference(before, after, config.promotion.confidence, resamples, seed)
    return Comparison(set, metric, _mean(after), _mean(before), difference)


def _outcomes(config: RunConfig, contestant: Contestant, set: str, metric: str) -> np.ndarray:
    return outcomes(contestant.samples, set, contestant.policy, metric, config.rewards, config.accuracy_reward)


def _held_to_gain(rules: PromotionConfig, gain: Comparison) -> Comparison:
    metric, found, allowed, broken = gain.metric, gain.difference, 1 - rules.confidence, None
    least = figures.size(metric, rules.min_gain)
    if not found.num_prompts:
        broken = "no prompt was scored by both"
    elif found.p_value > allowed:
        broken = (
            f"not shown to be better (by chance it looks so with probability {found.p_value:.2g}, and {allowed:.2g} is "
            f"allowed; {found.num_prompts:,} prompts find a true gain of {figures.detectable(metric, vars(found))} "
            f"with probability {POWER:g})"
        )
    elif found.mean < rules.min_gain:
        broken = f"better, but min_gain asks for {least}"
    rule = f"better, p ≤ {allowed:.2g}" + (f", by {least}" if rules.min_gain else "")
    return replace(gain, rule=rule, broken=broken)


def _held_to_guard(guard: Guard, found: Comparison) -> Comparison:
    # Nothing scored is NaN, which keeps no bound.
    keeps = {
        "max_drop": lambda bound: found.difference.low >= -bound,
        "max_rise": lambda bound: found.difference.high <= bound,
        "min": lambda bound: found.candidate >= bound,
        "max": lambda bound: found.candidate <= bound,
    }
    bounds = {name: bound for name in keeps if (bound := getattr(guard, name)) is not None}
    exceeded = [f"{name} {bound:g}" for name, bound in bounds.items() if not keeps[name](bound)]
    broken = None
    if exceeded:
        values = f"{figures.amount(found.metric, found.candidate)}, a change of {_change(found)}"
        broken = f"the guard {' and '.join(exceeded)} is broken: {found.metric} on {found.set} is {values}"
    return replace(found, rule=", ".join(f"{name} {bound:g}" for name, bound in bounds.items()), broken=broken)


def _mean(values: np.ndarray) -> float:
    scored = values[~np.isnan(values)]
    return float(scored.mean()) if len(scored) else float("nan")
