"""Numbers as text for people."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from grpo_core.config.metrics import evaluated_metric
from grpo_core.config.run import RunConfig

NONE = "–"
LIKELY = 0.1  # an unproven difference is called likely if the contrary is less probable than this


def metric_of(config: RunConfig, evaluation: Mapping[str, Any]) -> str:
    """Metric by which the run's policies are compared: accuracy or reward. `evaluation`: receipt of evaluate."""
    return config.promotion.metric or str(evaluation["deciding_metric"])


def is_share(metric: str) -> bool:
    return evaluated_metric(metric).is_share


def percent(value: float) -> str:
    """79.6%"""
    return NONE if math.isnan(value) else f"{value:.1%}"


def number(value: float) -> str:
    """Format a number: 0.436, 245.3, 12,345, 1.5e-05."""
    if math.isnan(value):
        return NONE
    size = abs(value)
    form = ",.0f" if size >= 1000 else ".1f" if size >= 100 else ".3g" if 0 < size < 0.01 else ".3f"
    return f"{value:{form}}"


def amount(metric: str, value: float) -> str:
    """Format a metric's value, in per cent if it is a share."""
    return percent(value) if is_share(metric) else number(value)


def interval(metric: str, found: Mapping[str, Any]) -> str:
    """Format an interval, in the metric's unit: [75.9, 82.9]."""
    scale, form = (100, ".1f") if is_share(metric) else (1, ".3f")
    if math.isnan(found["low"]):
        return ""
    return f"[{scale * found['low']:{form}}, {scale * found['high']:{form}}]"


def gain(metric: str, found: Mapping[str, Any]) -> str:
    """Format a gain: +35.4 points, or +0.354."""
    if math.isnan(found["mean"]):
        return NONE
    return f"{100 * found['mean']:+.1f} points" if is_share(metric) else f"{found['mean']:+.3f}"


def detectable(metric: str, found: Mapping[str, Any]) -> str:
    """Format the smallest detectable gain: 6.1 points, or 0.061; – if not even the largest possible one is."""
    return NONE if _too_few(metric, found) else size(metric, found["minimum_detectable"])


def power(metric: str, found: Mapping[str, Any], unit: str) -> str:
    """Say which gains the units of a paired difference would show: with 500 prompts, a true gain of 6.1 points or more
    is detected 80% of the time."""
    from grpo_core.evaluation.statistics import POWER  # imports scipy, too slow for `grpo status`

    n, least = found["num_units"], detectable(metric, found)
    units = f"{n:,} {unit}" if n != 1 else f"one {unit[:-1]}"
    if _too_few(metric, found):
        return f"{units} cannot show any gain"
    return f"with {units}, a true gain of {least} or more is detected {POWER:.0%} of the time"


def _too_few(metric: str, found: Mapping[str, Any]) -> bool:
    return is_share(metric) and found["minimum_detectable"] > 1


def size(metric: str, difference: float) -> str:
    """Format a difference without a sign: 6.1 points, or 0.061."""
    if math.isnan(difference):
        return NONE
    return f"{100 * difference:.1f} points" if is_share(metric) else f"{difference:.3f}"


def unit(found: Mapping[str, Any]) -> str:
    """What the figures of an evaluation set, or of a category, count as one: prompts, or groups of them."""
    return "groups" if "num_groups" in found else "prompts"


def counts(found: Mapping[str, Any]) -> str:
    """Format the size of an evaluation set: 500 prompts, or 500 prompts in 50 groups."""
    groups = f" in {found['num_groups']:,} groups" if "num_groups" in found else ""
    return f"{found['num_prompts']:,} prompts{groups}"


def verdict(metric: str, found: Mapping[str, Any], other: str, unit: str) -> str:
    """Describe the result of a paired difference (a `Difference` as in report.json) in a sentence. `unit`: what was
    paired, prompts or groups."""
    by = size(metric, abs(found["mean"]))
    measure = "" if is_share(metric) else f" in {evaluated_metric(metric).heading}"
    if not found["num_units"]:
        return f"no comparison with the {other}: no prompt was scored for both"
    if tone(found) == "better":
        return f"better than the {other} by {by}{measure} (p = {p_value(found['p_value'])})"
    if tone(found) == "worse":
        return f"worse than the {other} by {by}{measure}"
    if min(chance := found["probability_better"], 1 - chance) < LIKELY:
        which = "better" if chance > 0.5 else "worse"
        return (
            f"likely {which} than the {other} by {by}{measure}, which is not shown yet: the interval is "
            f"{interval(metric, found)}; {power(metric, found, unit)}"
        )
    return f"no difference from the {other}{measure} could be shown: {power(metric, found, unit)}"


def tone(found: Mapping[str, Any]) -> str:
    """Result of a paired difference: better, worse or open."""
    if found["p_value"] <= 1 - found["confidence"]:
        return "better"
    return "worse" if found["high"] < 0 else "open"


def probability(value: float) -> str:
    """Format a probability; one near 1 or 0 is not rounded to it."""
    return "> 99.9%" if value > 0.999 else "< 0.1%" if value < 0.001 else percent(value)


def p_value(value: float) -> str:
    return f"{value:.2g}"


def duration(seconds: float) -> str:
    """Format a duration: 2 h 05 min, 3 min 10 s, 12 s, 0.42 s."""
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    if whole >= 60:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole} s" if whole >= 10 else f"{seconds:.2g} s"
