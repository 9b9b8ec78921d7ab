"""Test repeatedly, while an arm of a sweep trains, whether it has fallen behind.

At each look, the arm and an arm that ran before it have been evaluated after the same update on the same prompts. The
hypothesis is that the arm is, at every look, at least as good in the mean over prompts (or groups of prompts that
belong together: what is paired has to be independent) as each arm before it. Betting
against it (Waudby-Smith & Ramdas 2024, arXiv:2010.09686) turns the paired differences of one look into an e-value: a
capital that under the hypothesis is not expected to grow, whatever the distribution of the bounded differences.

The looks share their prompts, so that the capital of one must not be staked at the next, as a confidence sequence over
fresh draws would. Each look and each earlier arm has a share of the capital of its own instead, fixed beforehand; the
shares add up to 1. Their sum is then not expected to exceed 1 however looks and arms depend on each other, and by
Markov's inequality it ever reaches 1 / level with a probability of at most `level`. The level of a sweep is divided by
the number of arms that can be stopped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy import special

STAKES = np.arange(1, 20) / 20  # shares of the capital that are bet on each unit; the capital is divided among them


def log_evidence(differences: np.ndarray, largest: float) -> float:
    """Logarithm of the e-value of one look. `differences`: the arm's outcome minus that of the other, one per unit,
    NaN where one was not scored; `largest`: their largest possible size."""
    scaled = differences[~np.isnan(differences)] / largest
    capitals = np.log1p(-STAKES[:, None] * scaled).sum(axis=1)
    return float(special.logsumexp(capitals) - math.log(len(STAKES)))


def has_fallen_behind(
    looks: Sequence[Sequence[np.ndarray]], earlier: int, stoppable: int, largest: float, level: float
) -> bool:
    """True if an arm should be stopped. `looks`: for each look in its order, the differences from each earlier arm that
    was evaluated then; `earlier`: arms that come before this one; `stoppable`: arms of the sweep that can be stopped;
    `level`: highest probability of stopping any arm that is as good as each arm before it at every look."""
    evidence = [
        log_evidence(differences, largest) - math.log(look * (look + 1)) - math.log(earlier)
        for look, of_look in enumerate(looks, start=1)
        for differences in of_look
    ]
    return bool(evidence) and float(special.logsumexp(evidence)) >= math.log(stoppable / level)
