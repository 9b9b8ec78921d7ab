"""The nearest valid runs to a refused one: what to change, by how much, and whether the batch stays the same.

The number of runs tried is bounded, however large the numbers are: per key, its smallest values, those near the present
one that the rules single out, and the divisors of the batch that divisors() finds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from grpo_core.planning.rules import (
    LARGEST,
    POSITIVE,
    PlanInputs,
    batch_problem,
    divisors,
    evaluation_problem,
    problems,
    warmup_problem,
)

Changes = Mapping[str, int | None]

SHOWN = 6
SMALLEST = 64  # values of a key that are tried from 1 on
PAIRED = 16  # values of each of two keys


@dataclass(frozen=True)
class Fix:
    """A change that makes a run valid. `changes`: key → new value, None for "remove it"."""

    changes: Changes
    generation_batch_size: int
    keeps_generation_batch: bool
    cost: float


def fixes(inputs: PlanInputs) -> list[Fix]:
    """The nearest valid runs, nearest first. Each has been checked against every rule.

    Distance: one per changed key, plus how often its value, and the generation batch, doubles or halves.
    """
    if any(value is not None and not 0 < value <= LARGEST for value in (getattr(inputs, key) for key in POSITIVE)):
        return []
    if not batch_problem(inputs) and not evaluation_problem(inputs):  # the warm-up alone
        return _nearest(inputs, iter([{}]))
    found: list[Fix] = []
    for tried in (_changes, _pairs):
        candidates = ({**removed, **more} for removed in _removals(inputs) for more in tried(_with(inputs, removed)))
        found = found or _nearest(inputs, candidates)
    return sorted(found, key=lambda fix: (fix.cost, len(fix.changes)))[:SHOWN]


def _nearest(inputs: PlanInputs, candidates: Iterator[Changes]) -> list[Fix]:
    """Return the nearest valid candidate for each set of keys that one changes."""
    nearest: dict[frozenset[str], Fix] = {}
    for changes in candidates:
        for valid in _repaired(inputs, {key: value for key, value in changes.items() if getattr(inputs, key) != value}):
            fix, keys = _fix(inputs, valid), frozenset(valid)
            if keys not in nearest or fix.cost < nearest[keys].cost:
                nearest[keys] = fix
    return list(nearest.values())


def _removals(inputs: PlanInputs) -> list[Changes]:
    """Settings to remove: one of two that exclude each other, or one that the system does not have."""
    given: list[Changes] = [
        {key: None} for key in ("steps_per_generation", "generation_batch_size") if getattr(inputs, key) is not None
    ]
    if not inputs.framework.sets_generation_batch:
        return [{key: value for change in given for key, value in change.items()}]
    return [*([{}] if inputs.framework.takes_both_sizes else []), *given] if len(given) == 2 else [{}]


def _changes(inputs: PlanInputs) -> Iterator[Changes]:
    """Changes of the training batch to try: none, one key, or two keys that keep the batch."""
    yield {}
    keys = _keys(inputs)
    for key in keys:
        yield from ({key: value} for value in _values(inputs, key))
    for first, second in itertools.combinations([key for key in keys if key != "num_generations"], 2):
        product = getattr(inputs, first) * getattr(inputs, second)
        yield from ({first: n, second: product // n} for n in divisors(product))


def _pairs(inputs: PlanInputs) -> Iterator[Changes]:
    """Changes of any two keys, for a run that no single change makes valid."""
    for first, second in itertools.combinations(_keys(inputs), 2):
        values = (itertools.islice(_values(inputs, key), PAIRED) for key in (first, second))
        yield from ({first: n, second: m} for n, m in itertools.product(*values))


def _values(inputs: PlanInputs, key: str) -> Iterator[int]:
    """The smallest values of a key; then those near the present one, and near the largest, that keep groups whole."""
    g, present = inputs.num_generations, getattr(inputs, key)
    yield from range(1, SMALLEST + 1)
    if key == "num_generations":
        yield from divisors(inputs.generation_batch)
    elif key == "generation_batch_size":
        micro_step = inputs.per_device_train_batch_size * inputs.num_processes
        yield from _multiples(math.lcm(micro_step, g), present, inputs.num_prompts * g)
    elif inputs.generation_batch_size:
        b, w = inputs.per_device_train_batch_size, inputs.num_processes
        other = w if key == "per_device_train_batch_size" else b
        yield from divisors(max(inputs.generation_batch_size // other, 1))
    else:
        alone = _with(inputs, {key: 1})
        unit = g // math.gcd(g, alone.generation_batch)
        yield from _multiples(unit, present, inputs.num_prompts * g // alone.prompt_batch)


def _multiples(unit: int, *near: int) -> Iterator[int]:
    """The multiples of `unit` on both sides of each number."""
    for number in near:
        below = number // unit * unit
        yield from (value for value in (below, below + unit) if value)


def _keys(inputs: PlanInputs) -> list[str]:
    """Keys that determine the training batch."""
    last = "gradient_accumulation_steps"
    if inputs.framework.sets_generation_batch and inputs.generation_batch_size:
        last = "generation_batch_size"
    elif inputs.framework.sets_generation_batch and inputs.steps_per_generation:
        last = "steps_per_generation"
    return ["num_generations", "per_device_train_batch_size", "num_processes", last]


def _repaired(inputs: PlanInputs, changes: Changes) -> Iterator[Changes]:
    """The change, together with one of the evaluation batch or the warm-up if needed; nothing if none helps."""
    changed = _with(inputs, changes)
    if batch_problem(changed):
        return
    if warmup_problem(changed):
        changes = {**changes, "warmup_steps": changed.total_updates}
        changed = _with(inputs, changes)
    if not evaluation_problem(changed):
        yield changes
        return
    for key, value in _evaluation_values(changed):
        if not problems(_with(changed, {key: value})):
            yield {**changes, key: value}


def _evaluation_values(inputs: PlanInputs) -> Iterator[tuple[str, int]]:
    """Evaluation batches of whole groups near the present and the largest one; groups that divide the present one."""
    b, w, g = inputs.per_device_eval_batch_size, inputs.num_processes, inputs.eval_generations
    assert b is not None
    largest = b if inputs.num_eval_prompts is None else inputs.num_eval_prompts * g // w
    yield from (("per_device_eval_batch_size", value) for value in _multiples(g // math.gcd(g, w), b, largest))
    yield from (("num_generations_eval", value) for value in divisors(b * w))


def _with(inputs: PlanInputs, changes: Changes) -> PlanInputs:
    values: dict[str, Any] = dict(changes)
    return replace(inputs, **values)


def _fix(inputs: PlanInputs, changes: Changes) -> Fix:
    before, after = inputs.prompt_batch, _with(inputs, changes).prompt_batch
    cost = len(changes) + abs(math.log2(after / before))
    for key, value in changes.items():
        present = inputs.eval_generations if key == "num_generations_eval" else getattr(inputs, key)
        cost += abs(math.log2(value / present)) if value and key != "warmup_steps" else 0
    return Fix(changes, after, after == before, round(cost, 3))
