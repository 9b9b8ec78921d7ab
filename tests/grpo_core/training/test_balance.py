"""Rows over processes: about as many tokens on each, groups whole where possible."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_core.training.batch import BOUND, divide
from tests.steps import steps

G = 8
# Each group: its prompt's tokens, its completions'.
GROUPS = st.lists(st.tuples(st.integers(1, 300), st.lists(st.integers(1, 500), min_size=1, max_size=G)), max_size=20)


def _long_tailed(seed: int, rows: int) -> tuple[list[int], list[int], list[int]]:
    """Groups, prompt lengths and completion lengths: a median of 400 tokens, one in six above 1000, 4096 at most."""
    draw = random.Random(seed)
    prompts = [draw.randint(100, 300) for _ in range(rows // G)]
    completions = [min(4096, max(1, round(draw.lognormvariate(math.log(400), 1)))) for _ in range(rows)]
    groups = [row // G for row in range(rows)]
    return groups, [prompts[group] for group in groups], completions


def _loads(parts: list[list[int]], groups: list[int], prompts: list[int], completions: list[int]) -> list[int]:
    """Tokens that each process computes: of its completions, and of each of its prompts once."""
    return [
        sum(completions[row] for row in part) + sum({groups[row]: prompts[row] for row in part}.values())
        for part in parts
    ]


@pytest.mark.parametrize("processes", [2, 4, 8])
@pytest.mark.parametrize(("rows", "held"), [(512, 7.9), (256, 7.5), (128, 6.5)])
def test_tokens_are_within_five_per_cent_of_the_mean_and_prompts_hardly_computed_twice(
    rows: int, held: float, processes: int
) -> None:
    """`held`: rows per prompt and process, at least in the mean. A random cut of 512 leaves 1.5 with 8 processes."""
    pairs = 0
    for seed in range(20):
        groups, prompts, completions = _long_tailed(seed, rows)
        parts = divide(groups, prompts, completions, processes)
        loads = _loads(parts, groups, prompts, completions)
        mean = sum(loads) / processes
        if max(completions) < mean / 3:
            assert max(abs(load - mean) for load in loads) <= BOUND * mean
        pairs += sum(len({groups[row] for row in part}) for part in parts)
    assert 20 * rows / pairs >= held


@pytest.mark.parametrize(("rows", "processes"), [(128, 16), (64, 8), (64, 16), (16, 8), (8, 8)])
def test_few_long_completions_keep_no_process_much_longer_than_they_must(rows: int, processes: int) -> None:
    for seed in range(50):
        groups, prompts, completions = _long_tailed(seed, rows)
        loads = _loads(divide(groups, prompts, completions, processes), groups, prompts, completions)
        longest = max(prompt + completion for prompt, completion in zip(prompts, completions, strict=True))
        assert max(loads) <= 1.05 * max(longest, (1 + BOUND) * sum(loads) / processes)


def test_two_thousand_processes_take_not_much_longer_than_two_hundred() -> None:
    groups, prompts, completions = _long_tailed(0, 2048)
    few, many = (steps(lambda of=processes: divide(groups, prompts, completions, of)) for processes in (200, 2000))
    assert many < 3 * few


@settings(max_examples=3 * settings.default.max_examples)
@given(GROUPS, st.integers(1, 9))
def test_every_row_is_on_one_process_and_groups_are_split_only_for_balance(
    drawn: list[tuple[int, list[int]]], processes: int
) -> None:
    groups = [number for number, (_, lengths) in enumerate(drawn) for _ in lengths]
    prompts = [prompt for prompt, lengths in drawn for _ in lengths]
    completions = [length for _, lengths in drawn for length in lengths]
    parts = divide(groups, prompts, completions, processes)
    assert len(parts) == processes
    assert sorted(row for part in parts for row in part) == list(range(len(groups)))
    assert all(part == sorted(part) for part in parts)
    assert parts == divide(groups, prompts, completions, processes)

    # Whole groups to the process that has least, the costliest first: if that is balanced, it is what is done.
    costs = sorted((prompt + sum(lengths) for prompt, lengths in drawn), reverse=True)
    whole = [0] * processes
    for cost in costs:
        whole[whole.index(min(whole))] += cost
    mean = sum(whole) / processes
    loads = _loads(parts, groups, prompts, completions)
    if max(abs(load - mean) for load in whole) <= BOUND * mean:
        assert sorted(loads) == sorted(whole)
    assert max(loads, default=0) <= max(whole)
