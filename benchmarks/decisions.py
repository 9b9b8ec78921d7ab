"""Simulates how often the intervals and tests that decide on promotions err.

    python -m benchmarks.decisions [--trials 2000] [--output benchmarks/results/decisions.md]

Writes the tables that docs/explanation/evaluation.md refers to. Seeded: the same trials give the same tables.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from scipy import stats

from grpo_core.data.units import paired_units, per_unit
from grpo_core.evaluation.sequential import has_fallen_behind
from grpo_core.evaluation.statistics import BINARY, estimate, paired_difference, seen_bounds, tail
from tasks.registry.gate import level_of
from tasks.tracking.early_stop import shared_level

SIZES = (10, 20, 50, 100, 200, 500, 1000)
CONFIDENCE = 0.95
LEVEL = 1 - CONFIDENCE
GROUPED, GROUP_SIZES, ARMS, EVALUATIONS = 200, (1, 2, 5, 10), 4, 6
OUTSIDE = LEVEL / 2
Draw = Callable[[np.random.Generator, int], tuple[np.ndarray, np.ndarray]]  # outcomes on n prompts, before and after

RATES = [(0.05, 0.0), (0.1, 0.0), (0.1, 0.05), (0.03, 0.05), (0.02, 0.0), (0.01, 0.01), (0.1, 0.1), (0.2, 0.2)]


def rare_loss(share: float) -> Draw:
    """Draw outcomes that lose everything on a share of the prompts and win it back in small gains on the others: mean
    difference 0."""

    def draw(rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray]:
        rest = 1 - share
        return np.full(n, rest), np.where(rng.random(n) < share, 0.0, rest + share)

    return draw


def samples(rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray]:
    rates = rng.uniform(0.1, 0.9, n)
    return rng.binomial(4, rates) / 4, rng.binomial(4, rates) / 4


def ties(rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw outcomes of which four prompts in five are always right."""
    rates = np.where(rng.random(n) < 0.8, 1.0, 0.6)
    return rng.binomial(4, rates) / 4, rng.binomial(4, rates) / 4


def centred(draw: Callable[[np.random.Generator, int], np.ndarray]) -> Draw:
    return lambda rng, n: (np.zeros(n), draw(rng, n))


KNOWN: dict[str, Draw] = {
    "-1 on 1 % of prompts, gains on the others": rare_loss(0.01),
    "-1 on 2 %": rare_loss(0.02),
    "-1 on 5 %": rare_loss(0.05),
    "four samples per prompt": samples,
    "four samples, most prompts always right": ties,
}
UNKNOWN: dict[str, Draw] = {
    **{name: KNOWN[name] for name in list(KNOWN)[:3]},
    "minus lognormal": centred(lambda rng, n: math.exp(0.5) - rng.lognormal(size=n)),
    "lognormal": centred(lambda rng, n: rng.lognormal(size=n) - math.exp(0.5)),
    "Student's t, 2 degrees of freedom": centred(lambda rng, n: rng.standard_t(2, n)),
    "normal": centred(lambda rng, n: rng.normal(size=n)),
}


def rates_table(trials: int) -> Iterator[list[str]]:
    """Rows for paired differences of right and wrong: coverage, how often a guard with max_drop = the true loss is
    kept, and how often a candidate is found better."""
    for losses, wins in RATES:
        rng, mean = np.random.default_rng(1), wins - losses
        covered, kept, better = [], [], []
        for n in SIZES:
            tables, counts = np.unique(
                rng.multinomial(n, [wins, losses, 1 - wins - losses], size=10 * trials), axis=0, return_counts=True
            )
            found = [_of_table(*map(int, table)) for table in tables]
            shares = counts / counts.sum()
            covered.append(float(shares @ [low <= mean <= high for low, high, _ in found]))
            kept.append(float(shares @ [low >= mean for low, _, _ in found]))
            better.append(float(shares @ [p <= LEVEL for _, _, p in found]))
        label = f"{losses:.0%} lost, {wins:.0%} won"
        yield [f"{label}: interval covers", *map(_percent, covered)]
        yield [f"{label}: guard wrongly kept", *map(_percent, kept)]
        if mean <= 0:
            yield [f"{label}: found better", *map(_percent, better)]


def _of_table(wins: int, losses: int, same: int) -> tuple[float, float, float]:
    before, after = [0.0] * wins + [1.0] * (losses + same), [1.0] * wins + [0.0] * losses + [1.0] * same
    found = paired_difference(before, after, CONFIDENCE, BINARY)
    return found.low, found.high, found.p_value


def means_table(trials: int) -> Iterator[list[str]]:
    """Rows with the coverage of a mean's interval: for zeros and ones (summed over the binomial distribution), and for
    four samples per prompt."""
    for rate in (0.5, 0.9, 0.97):
        covered = []
        for n in SIZES:
            found = [estimate([1.0] * right + [0.0] * (n - right), CONFIDENCE, BINARY) for right in range(n + 1)]
            chances = stats.binom.pmf(np.arange(n + 1), n, rate)
            covered.append(float(chances @ [it.low <= rate <= it.high for it in found]))
        yield [f"one sample, {rate:.0%} right", *map(_percent, covered)]
    for hard in (0.3, 1.0):
        rng, mean, covered = np.random.default_rng(5), 1 - 0.1 * hard, []
        for n in SIZES:
            drawn = [rng.binomial(4, np.where(rng.random(n) < hard, 0.9, 1.0)) / 4 - mean for _ in range(trials)]
            sides = [(tail(np.append(it, -mean)), tail(np.append(-it, mean - 1))) for it in drawn]
            covered.append(float((np.array(sides) > OUTSIDE).all(axis=1).mean()))
        yield [f"four samples, {mean:.0%} right", *map(_percent, covered)]


def graded_table(shapes: dict[str, Draw], known: bool, trials: int) -> Iterator[list[str]]:
    """Rows for graded paired differences with a true mean of 0: how often a candidate is found better, and how often
    the interval covers."""
    for name, draw in shapes.items():
        rng = np.random.default_rng(2)
        better, covered = [], []
        for n in SIZES:
            p_values = np.array([_graded(*draw(rng, n), known) for _ in range(trials)])
            better.append(float((p_values[:, 0] <= LEVEL).mean()))
            covered.append(float((p_values > OUTSIDE).all(axis=1).mean()))
        yield [f"{name}: found better", *map(_percent, better)]
        yield [f"{name}: interval covers", *map(_percent, covered)]


def _graded(before: np.ndarray, after: np.ndarray, known: bool) -> tuple[float, float]:
    """p-values of "not better" and "not worse"; the interval covers 0 if both exceed half the level."""
    low, high = BINARY if known else seen_bounds((-math.inf, math.inf), np.concatenate([before, after]))
    differences = after - before
    return tail(np.append(differences, low - high)), tail(np.append(-differences, low - high))


def nights_table(series: int, nights: int = 100) -> Iterator[list[str]]:
    """Rows for nightly candidates that are no better than the champion, all judged on the same prompts."""
    for n in (200, 500):
        for title, spend in (("level 0.05 each night", False), ("0.05 spent over the attempts", True)):
            rng = np.random.default_rng(3)
            promotions, inflated = [], []
            for _ in range(series):
                rates = rng.beta(2, 2, n)
                champion, attempt, promoted = rng.random(n) < rates, 0, 0
                for _ in range(nights):
                    candidate, attempt = rng.random(n) < rates, attempt + 1
                    level = level_of(attempt, CONFIDENCE) if spend else LEVEL
                    wins, losses = int((candidate & ~champion).sum()), int((champion & ~candidate).sum())
                    if stats.binom.sf(wins - 1, wins + losses, 0.5) <= level:
                        champion, attempt, promoted = candidate, 0, promoted + 1
                promotions.append(promoted)
                inflated.append(float(champion.mean() - rates.mean()))
            yield [
                f"{n} prompts, {title}",
                f"{np.mean(promotions):.2f}",
                _percent(float(np.mean(np.array(promotions) > 0))),
                f"{100 * np.mean(inflated):+.1f} points",
            ]


def power_table(trials: int) -> Iterator[list[str]]:
    """Rows with the rate at which a truly better candidate is promoted, by attempt; 20 % of the prompts differ in
    outcome."""
    for n in (200, 500, 1000):
        for gain in (0.05, 0.1):
            found = []
            for attempt in (1, 2, 10, 100):
                rng = np.random.default_rng(4)
                wins, losses, _ = rng.multinomial(n, [0.1 + gain / 2, 0.1 - gain / 2, 0.8], size=10 * trials).T
                found.append(
                    float((stats.binom.sf(wins - 1, wins + losses, 0.5) <= level_of(attempt, CONFIDENCE)).mean())
                )
            yield [f"{n:,} prompts, {100 * gain:.0f} points better", *map(_percent, found)]


def groups_table(trials: int) -> Iterator[list[str]]:
    """Rows for policies that are equally good, whose answers are right or wrong for a whole group of prompts: how often
    a sweep stops an arm, and how often a candidate is found better, with prompts and with groups as the unit."""
    for size in GROUP_SIZES:
        rng, groups = np.random.default_rng(6), np.arange(GROUPED) // size
        stopped, better = [], []
        for _ in range(trials):
            right = _equal_arms(rng, GROUPED // size)[..., groups]
            stopped.append([_stops_one(right, numbers) for numbers in (np.arange(GROUPED), groups)])
            before, after = right[:2, -1]
            pairs = (before, after), paired_units(before, after, groups)
            better.append([paired_difference(*pair, CONFIDENCE, BINARY).p_value <= LEVEL for pair in pairs])
        label = f"{size} prompts per group" if size > 1 else "each prompt by itself"
        yield [label, *map(_percent, np.mean(stopped, axis=0)), *map(_percent, np.mean(better, axis=0))]


def _equal_arms(rng: np.random.Generator, groups: int) -> np.ndarray:
    """Right or wrong of each arm at each evaluation on each group. Groups differ in difficulty; from one evaluation to
    the next, an arm answers nine groups in ten as before. (ARMS, EVALUATIONS, groups)"""
    right = (rng.random((ARMS, EVALUATIONS, groups)) < rng.beta(2, 2, groups)).astype(float)
    for k in range(1, EVALUATIONS):
        right[:, k] = np.where(rng.random((ARMS, groups)) < 0.9, right[:, k - 1], right[:, k])
    return right


def _stops_one(right: np.ndarray, numbers: np.ndarray) -> bool:
    """True if one of the arms is stopped. The evidence never shrinks, so that of all evaluations decides."""
    level = shared_level(CONFIDENCE)
    return any(
        has_fallen_behind(
            [[per_unit(right[arm, k] - right[other, k], numbers) for other in range(arm)] for k in range(EVALUATIONS)],
            *(arm, ARMS - 1, 1.0, level),
        )
        for arm in range(1, ARMS)
    )


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _table(title: str, head: Sequence[str], rows: Iterator[list[str]]) -> str:
    lines = [["", *head], ["---"] * (len(head) + 1), *rows]
    print(title, flush=True)
    return f"## {title}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=2000)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/decisions.md"))
    arguments = parser.parse_args()
    trials = arguments.trials
    sizes = [f"N = {n:,}" for n in SIZES]
    parts = [
        f"# How often decisions err\n\n`python -m benchmarks.decisions --trials {trials}`. Intervals of 95 %, so they "
        "should cover at least 95 %, a guard be wrongly kept in at most 2.5 %, and a candidate that is no better be "
        "found better in at most 5 %.\n",
        _table("Paired differences of right and wrong", sizes, rates_table(trials)),
        _table("Means of right and wrong: interval covers", sizes, means_table(trials)),
        _table("Other outcomes, range known", sizes, graded_table(KNOWN, True, trials)),
        _table("Other outcomes, range not known", sizes, graded_table(UNKNOWN, False, trials)),
        _table(
            "A hundred nights on the same prompts, no candidate better",
            ["promotions", "at least one", "champion's accuracy above its true one"],
            nights_table(max(1, trials // 5)),
        ),
        _table(
            "Power against the same champion, 20 % of the prompts tell the two apart",
            [f"attempt {attempt}" for attempt in (1, 2, 10, 100)],
            power_table(trials),
        ),
        _table(
            f"{GROUPED} prompts in groups of one outcome: {ARMS} equal arms, {EVALUATIONS} evaluations",
            [
                f"{what}, by {unit}"
                for what in ("sweeps that stop an arm (2.5 % allowed)", "found better (5 % allowed)")
                for unit in ("prompts", "groups")
            ],
            groups_table(trials),
        ),
    ]
    arguments.output.write_text("\n".join(parts))


if __name__ == "__main__":
    main()
