"""The nearest valid runs to one that is refused: what to change, how much it changes, whether the batch stays."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from grpo_core.rules import LEGACY, PlanInputs, batch_problems, evaluation_problems, problems

SHOWN = 6
REACH = 4  # values up to this many times the present one, or G, are tried


@dataclass(frozen=True)
class Fix:
    """A change that makes a run valid. `changes`: key → new value, None for "remove it"."""

    changes: dict[str, int | None]
    generation_batch_size: int
    keeps_generation_batch: bool
    cost: float


def fixes(inputs: PlanInputs) -> list[Fix]:
    """The nearest valid runs, nearest first; each satisfies every rule, since each has been held against them.

    Distance: one for each key that changes, plus how often the value doubles or halves, the generation batch's too.
    """
    found = {}
    for changes in _changes(inputs):
        for whole in _repaired(inputs, changes):
            fix = _fix(inputs, whole)
            nearest = found.get(frozenset(whole))
            if nearest is None or fix.cost < nearest.cost:
                found[frozenset(whole)] = fix
    return sorted(found.values(), key=lambda fix: (fix.cost, len(fix.changes)))[:SHOWN]


def _changes(inputs: PlanInputs) -> Iterator[dict[str, int | None]]:
    """Changes of the training batch that are worth a try: none, one key, or two that keep the batch."""
    yield {}
    if inputs.steps_per_generation and inputs.generation_batch_size:
        yield {"steps_per_generation": None}
        yield {"generation_batch_size": None}
    keys = _keys(inputs)
    for key in keys:
        present = getattr(inputs, key)
        yield from ({key: value} for value in range(1, REACH * max(present, inputs.num_generations) + 1))
    for first, second in itertools.permutations([key for key in keys if key != "num_generations"], 2):
        product = getattr(inputs, first) * getattr(inputs, second)
        yield from ({first: n, second: product // n} for n in range(1, product + 1) if product % n == 0)


def _keys(inputs: PlanInputs) -> list[str]:
    """The keys that the training batch follows from."""
    last = "gradient_accumulation_steps"
    if inputs.rules not in LEGACY and inputs.generation_batch_size:
        last = "generation_batch_size"
    elif inputs.rules not in LEGACY and inputs.steps_per_generation:
        last = "steps_per_generation"
    return ["num_generations", "per_device_train_batch_size", "num_processes", last]


def _repaired(inputs: PlanInputs, changes: dict[str, int | None]) -> Iterator[dict[str, int | None]]:
    """The change, with one of the evaluation batch where that is needed too; nothing if neither helps."""
    changed = _with(inputs, changes)
    if batch_problems(changed):
        return
    if not evaluation_problems(changed):
        yield changes
        return
    for key in ("per_device_eval_batch_size", "num_generations_eval"):
        present = (
            changed.per_device_eval_batch_size if key == "per_device_eval_batch_size" else changed.eval_generations
        )
        assert present is not None
        for value in sorted(
            range(1, REACH * max(present, changed.eval_generations) + 1), key=lambda n: abs(n - present)
        ):
            if not problems(_with(changed, {key: value})):
                yield {**changes, key: value}
                break


def _with(inputs: PlanInputs, changes: Mapping[str, Any]) -> PlanInputs:
    return replace(inputs, **changes)


def _fix(inputs: PlanInputs, changes: dict[str, int | None]) -> Fix:
    before, after = inputs.prompt_batch, _with(inputs, changes).prompt_batch
    cost = len(changes) + abs(math.log2(after / before))
    for key, value in changes.items():
        present = inputs.eval_generations if key == "num_generations_eval" else getattr(inputs, key)
        cost += abs(math.log2(value / present)) if value else 0
    return Fix(changes, after, after == before, round(cost, 3))
