"""Samples of several policies → report.json: figures with intervals, paired differences, by set and by category."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
import polars as pl

from grpo_core.config.evaluation import WARM_START
from grpo_core.config.metrics import DECIDING, evaluated_metrics, reward_means
from grpo_core.config.run import RunConfig
from grpo_core.data.units import paired_units, per_unit
from grpo_core.evaluation.outcomes import (
    bounds_of,
    majority,
    outcomes,
    prompt_numbers,
    samples_of,
    unit_name,
    unit_numbers,
)
from grpo_core.evaluation.statistics import Bounds, Difference, estimate, paired_difference, seen_bounds

Outcomes = Mapping[str, Mapping[str, np.ndarray]]  # policy → metric → one value per row of the set


def compare_policies(samples: pl.DataFrame, config: RunConfig, policies: Sequence[str]) -> dict[str, Any]:
    """Compare the policies on each evaluation set, and each source of the held-out prompts: number of prompts (and of
    groups, if they are the unit), every policy's figures, and the last policy minus each of the others; with a warm
    start, also its own gain: the policy after it minus the base."""
    held_out, *others = config.evaluation_files
    names = (held_out, *config.evaluated_sources, *others)
    return {name: _compare_on(name, samples, config, policies) for name in names}


def _compare_on(name: str, samples: pl.DataFrame, config: RunConfig, policies: Sequence[str]) -> dict[str, Any]:
    like = {name: name for name in config.evaluated_sources} | {it.name: it.source for it in config.evaluation.sets}
    metrics = _metrics(config, config.rewards_of(like.get(name)))
    found = {policy: {metric: of(samples, name, policy) for metric, of in metrics.items()} for policy in policies}
    everywhere = np.ones(len(found["base"]["reward"]), dtype=bool)
    numbers, prompts = unit_numbers(samples, name), prompt_numbers(samples, name)

    def counts(rows: np.ndarray) -> dict[str, int]:
        units = {"prompts": prompts} | {unit_name(samples): numbers}
        return {f"num_{unit}": len(np.unique(its[rows])) for unit, its in units.items()}

    report: dict[str, Any] = counts(everywhere) | _figures(found, [*metrics], everywhere, numbers, config)
    del report["policies"]["base"]["kl"]
    categories = _categories(samples, name)
    if categories is not None:
        kinds = sorted({kind for kind in categories if kind is not None})
        report["categories"] = {
            kind: counts(categories == kind) | _figures(found, DECIDING, categories == kind, numbers, config)
            for kind in kinds
        }
    return report


def _metrics(config: RunConfig, scored_by: Sequence[str]) -> dict[str, Callable[[pl.DataFrame, str, str], np.ndarray]]:
    """Metric → its outcomes, given samples, set and policy. `scored_by`: the rewards of the prompts' source."""
    n, right = config.evaluation.num_samples, config.accuracy_reward
    names = [
        *DECIDING,
        *reward_means(scored_by),
        *(name for name in evaluated_metrics(config.environment.is_used) if name not in DECIDING),
    ]
    if n > 1:
        names += [f"pass@{k}" for k in (*(2**i for i in range(n.bit_length()) if 2**i < n), n)]

    found: dict[str, Callable[[pl.DataFrame, str, str], np.ndarray]] = {
        metric: partial(outcomes, metric=metric, rewards=config.rewards, accuracy_reward=right) for metric in names
    }
    if n > 1:
        pattern = config.evaluation.answer_pattern
        found[f"majority@{n}"] = partial(majority, accuracy_reward=right, answer_pattern=pattern)
    return found


def _figures(
    found: Outcomes, metrics: Sequence[str], rows: np.ndarray, numbers: np.ndarray, config: RunConfig
) -> dict[str, Any]:
    """Figures of all policies on the rows where `rows` is true. `numbers`: see `unit_numbers`."""
    confidence = config.evaluation.confidence
    bounds = {metric: bounds_of(metric, config) for metric in metrics}
    on_rows = {name: {metric: values[metric][rows] for metric in metrics} for name, values in found.items()}
    numbers = numbers[rows]
    of_units = {
        name: {metric: per_unit(values[metric], numbers) for metric in metrics} for name, values in on_rows.items()
    }
    seen = {metric: _seen(bounds[metric], [values[metric] for values in found.values()]) for metric in metrics}
    *others, last = on_rows

    def difference(other: str, metric: str, later: str = last) -> Difference:
        before, after = paired_units(on_rows[other][metric], on_rows[later][metric], numbers)
        return paired_difference(before, after, confidence, bounds[metric])

    warm = {metric: asdict(difference("base", metric, WARM_START)) for metric in metrics if WARM_START in others}
    return ({"warm_start": warm} if warm else {}) | {
        "policies": {
            policy: {metric: asdict(estimate(values[metric], confidence, seen[metric])) for metric in metrics}
            for policy, values in of_units.items()
        },
        "differences": {other: {metric: asdict(difference(other, metric)) for metric in metrics} for other in others},
    }


def _seen(bounds: Bounds, of_policies: Sequence[np.ndarray]) -> Bounds:
    """The bounds; the outermost outcome of all policies replaces an infinite one, since those of one may be equal."""
    values = np.concatenate(of_policies)
    return bounds if np.isnan(values).all() else seen_bounds(bounds, values)


def _categories(samples: pl.DataFrame, name: str) -> np.ndarray | None:
    """Category of each prompt of a set; None if no prompt has one."""
    if "category" not in samples.columns:
        return None
    first = samples_of(samples, name).filter(pl.col("sample") == 0).sort("row")["category"]
    return None if first.is_null().all() else np.array(first.to_list(), dtype=object)
