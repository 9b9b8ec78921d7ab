"""Rules of promotion that no version can keep, or none that merely stays as good, by the prompts that there are."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from grpo_core.config.evaluation import Guard
from grpo_core.config.metrics import DECIDING
from grpo_core.config.run import RunConfig
from grpo_core.evaluation.outcomes import bounds_of
from grpo_core.evaluation.statistics import BINARY, paired_difference
from tasks.registry.gate import LEAST_UNITS, level_of

DOUBLED = [2**power for power in range(18)]  # numbers of prompts, or groups


def impossible_rules(config: RunConfig) -> Iterator[str]:
    """Yield the rules that no figures can keep, whichever metric will decide."""
    rules = config.promotion
    widest = max([rules.metric] if rules.metric else DECIDING, key=lambda metric: _width(metric, config))
    if rules.min_gain > (width := _width(widest, config)):
        yield f"promotion.min_gain = {rules.min_gain:g}: {_range(widest, config)}; lower it to {width:g} or less"
    for guard in rules.guards:
        lowest, highest = bounds_of(guard.metric, config)
        said = _range(guard.metric, config)
        if guard.min is not None and guard.min > highest:
            yield f"the guard min = {guard.min:g}: {said}; lower it to {highest:g} or less"
        if guard.max is not None and guard.max < lowest:
            yield f"the guard max = {guard.max:g}: {said}; raise it to {lowest:g} or more"


def _width(metric: str, config: RunConfig) -> float:
    lowest, highest = bounds_of(metric, config)
    return highest - lowest


def _range(metric: str, config: RunConfig) -> str:
    lowest, highest = bounds_of(metric, config)
    return f"{metric} is from {lowest:g} to {highest:g}"


def rules_beyond_size(config: RunConfig, metric: str, num_units: Mapping[str, int]) -> Iterator[str]:
    """Yield a warning for each rule that too few prompts cannot show to be kept. `metric`: the one that decides.
    `num_units`: number of prompts, or of their groups, of each evaluation set and of each source's held-out part."""
    rules, size, unit = config.promotion, num_units[config.promotion.set], _unit(config)
    level, bounds = level_of(1, rules.confidence), bounds_of(metric, config)

    def can_show_a_gain(size: int) -> bool:
        worst, best = (np.full(size, bound) for bound in bounds)
        return paired_difference(worst, best, rules.confidence, bounds).p_value <= level

    if all(map(math.isfinite, bounds)) and not can_show_a_gain(size):
        yield (
            f"no version can be promoted: even the largest gain in {metric} on all {size:,} {unit} of {rules.set!r} "
            f"would not be shown with promotion.confidence = {rules.confidence:g}. Hold out {_least(can_show_a_gain)} "
            f"{unit} or more"
        )
    if rules.min_gain > _width(metric, config):
        yield f"promotion.min_gain = {rules.min_gain:g} cannot be reached if {metric} decides: {_range(metric, config)}"
    for guard in rules.guards:
        for name, bound in (("max_drop", guard.max_drop), ("max_rise", guard.max_rise)):
            if bound is not None and (problem := _unprovable(guard, bound, config, num_units[guard.set])):
                yield f"the guard {name} = {bound:g} of {guard.metric} on {guard.set!r} {problem}"


def _unprovable(guard: Guard, bound: float, config: RunConfig, size: int) -> str | None:
    """Return why so many units cannot show that the metric has changed by at most `bound`, as part of a sentence; None
    if they can."""
    bounds, unit = bounds_of(guard.metric, config), _unit(config)
    if not all(map(math.isfinite, bounds)):
        few = f"cannot be kept: the metric has no known range, for which {size:,} {unit} are too few"
        return None if size >= LEAST_UNITS else f"{few}. Hold out {LEAST_UNITS} {unit} or more"

    def reach(size: int) -> float:
        """End of the interval if no outcome changes; downwards as far as upwards."""
        outcomes = np.full(size, 0.5 if bounds == BINARY and config.evaluation.num_samples > 1 else bounds[1])
        return paired_difference(outcomes, outcomes, config.promotion.confidence, bounds).high

    if reach(size) <= bound:
        return None
    return (
        f"cannot be kept by a version that is just as good: with {size:,} {unit}, the interval reaches "
        f"{reach(size):.3g} even if no outcome changes. Raise the bound above that, or hold out "
        f"{_least(lambda size: reach(size) <= bound)} {unit}"
    )


def _unit(config: RunConfig) -> str:
    return "groups" if config.evaluation.group_column else "prompts"


def _least(are_enough: Callable[[int], bool]) -> str:
    """The least number of units that are enough."""
    enough = next((size for size in DOUBLED if are_enough(size)), None)
    if enough is None:
        return f"more than {DOUBLED[-1]:,}"
    return f"{bisect.bisect_left(range(enough), True, lo=enough // 2, key=are_enough):,}"
