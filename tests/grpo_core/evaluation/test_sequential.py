"""However often it is looked, few sweeps stop an arm that is no worse; one that is clearly worse is soon stopped."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from grpo_core.evaluation.sequential import STAKES, has_fallen_behind, log_evidence

LEVEL, ARMS, PROMPTS, LOOKS = 0.1, 4, 60, 6


def outcomes(rng: np.random.Generator, rates: Sequence[float], prompts: int = PROMPTS) -> np.ndarray:
    """Right or wrong of each arm at each look on each prompt. Prompts differ in difficulty; from look to look, an
    arm answers three prompts in four as before. (arms, looks, prompts)"""
    ease = rng.normal(0, 0.25, prompts)
    drawn = rng.random((len(rates), LOOKS, prompts))
    for look in range(1, LOOKS):
        kept = rng.random((len(rates), prompts)) < 0.75
        drawn[:, look] = np.where(kept, drawn[:, look - 1], drawn[:, look])
    return (drawn < np.clip(np.array(rates)[:, None, None] + ease, 0, 1)).astype(float)


def stopped(right: np.ndarray, level: float = LEVEL) -> dict[int, int]:
    """The arms that a sweep stops, with the look at which. Later arms are not compared with what was not reached."""
    ends: dict[int, int] = {}
    for arm in range(1, len(right)):
        for look in range(1, LOOKS + 1):
            looks = [
                [right[arm, k] - right[other, k] for other in range(arm) if k < ends.get(other, LOOKS)]
                for k in range(look)
            ]
            if has_fallen_behind(looks, arm, len(right) - 1, 1.0, level):
                ends[arm] = look
                break
    return ends


def test_the_capital_is_that_of_bets_against_the_hypothesis() -> None:
    differences = np.array([-1.0, 0.5, math.nan, 0.0])
    capitals = [(1 + stake / 2) * (1 - stake / 4) for stake in STAKES]
    assert log_evidence(differences, 2.0) == pytest.approx(math.log(np.mean(capitals)))
    assert log_evidence(np.full(5, math.nan), 1.0) == 0, "nothing compared, nothing won"


LOOKS_OF_ARM = st.lists(
    st.lists(st.lists(st.sampled_from([-1.0, -0.5, 0.0, 0.5, math.nan]), min_size=4, max_size=4), max_size=2),
    min_size=1,
    max_size=4,
).filter(lambda looks: any(looks))


@given(looks=LOOKS_OF_ARM, earlier=st.integers(2, 3), stoppable=st.integers(3, 5))
def test_an_arm_is_stopped_from_the_capital_on_that_looks_rivals_and_arms_leave(
    looks: list[list[list[float]]], earlier: int, stoppable: int
) -> None:
    """Each look k has 1 / k(k + 1) of the capital, each earlier arm an equal share of that, each arm of the level."""
    capital = 0.0
    for k, of_look in enumerate(looks, start=1):
        for differences in of_look:
            bets = [math.prod(1 - stake / 20 * it for it in differences if it == it) for stake in range(1, 20)]
            capital += sum(bets) / 19 / (k * (k + 1)) / earlier
    arrays = [[np.array(differences) for differences in of_look] for of_look in looks]
    level = stoppable / capital
    assert has_fallen_behind(arrays, earlier, stoppable, 1.0, level * (1 + 1e-9))
    assert not has_fallen_behind(arrays, earlier, stoppable, 1.0, level * (1 - 1e-9))


@pytest.mark.slow
def test_at_most_the_level_of_sweeps_stop_an_arm_that_is_no_worse() -> None:
    """A test of its own at each look for each pair stops an arm of most sweeps."""
    rng, sweeps = np.random.default_rng(0), 50
    found = naive = 0
    for _ in range(sweeps):
        right = outcomes(rng, [0.5] * ARMS)
        found += bool(stopped(right))
        differences = right[1:] - right[:1]  # of each other arm to the first, at each look
        spread = differences.std(axis=2) / math.sqrt(PROMPTS)
        naive += bool((differences.mean(axis=2) / np.maximum(spread, 1e-9) < stats.norm.ppf(LEVEL)).any())
    assert found <= sweeps * LEVEL + 2 * math.sqrt(sweeps * LEVEL * (1 - LEVEL))
    assert naive > sweeps / 3


def test_an_arm_that_is_far_behind_is_stopped_and_one_that_is_ahead_is_not() -> None:
    rng = np.random.default_rng(1)
    ends = [stopped(outcomes(rng, [0.5, 0.2, 0.7], prompts=200)) for _ in range(20)]
    assert sum(1 in of_sweep for of_sweep in ends) >= 18
    assert all(2 not in of_sweep for of_sweep in ends)
    assert np.mean([of_sweep.get(1, LOOKS) for of_sweep in ends]) < LOOKS / 2, "soon"


def test_no_rivals_stop_nothing() -> None:
    assert not has_fallen_behind([], 1, 3, 1.0, 0.05)
    assert not has_fallen_behind([[], []], 1, 3, 1.0, 0.05)
