"""Simulates promoting the best-looking of K versions that were all evaluated on the same prompts.

    python -m benchmarks.looks [--trials 2000] [--output benchmarks/results/looks.md]

Writes the table that docs/how-to/promote.md shows. Seeded: the same trials give the same table.

A rival is right on each of N prompts with a probability of one half. Each version's answers are drawn again on a share
of the prompts, and are the rival's on the others. If it is better by d, the probability is higher on that share, so
that its accuracy is expected d above the rival's. The
versions are evaluated in a random order. A person reads all reports and promotes the version with the highest accuracy,
or tries all of them, in their order. Tested by McNemar's exact test at the gate's levels (`tasks.registry.gate`).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from scipy import stats

from tasks.registry.gate import level_of

CONFIDENCE = 0.95
COUNTS = (1, 3, 5, 10, 20)
SHAPES = ((200, 0.4), (500, 0.2), (500, 0.4))  # number of prompts, share drawn again
GAINS = (0.05, 0.1)


def p_values_of(
    trials: int, count: int, num_prompts: int, redrawn: float, gain: float
) -> tuple[np.ndarray, np.ndarray]:
    """p-value and accuracy of each version; both trials × count. The first column's version is better by `gain`."""
    rng = np.random.default_rng([count, num_prompts, int(100 * redrawn)])
    p_values, accuracies = np.empty((2, trials, count))
    rates = np.full((count, 1), 0.5)
    rates[0] += gain / redrawn
    for trial in range(trials):
        rival = rng.random(num_prompts) < 0.5
        again = rng.random((count, num_prompts)) < redrawn
        right = np.where(again, rng.random(again.shape) < rates, rival)
        wins, losses = (right & ~rival).sum(axis=1), (~right & rival).sum(axis=1)
        p_values[trial] = stats.binom.sf(wins - 1, wins + losses, 0.5)
        accuracies[trial] = right.mean(axis=1)
    return p_values, accuracies


def promoted(p_values: np.ndarray, accuracies: np.ndarray) -> dict[str, np.ndarray]:
    """Whether each version is promoted, by what the person does and the gate counts; each trials × count."""
    trials, count = p_values.shape
    order = np.random.default_rng(0).permuted(np.tile(np.arange(1, count + 1), (trials, 1)), axis=1)
    levels = np.array([level_of(attempt, CONFIDENCE) for attempt in range(1, count + 1)])[order - 1]
    best = accuracies == accuracies.max(axis=1, keepdims=True)
    best &= best.cumsum(axis=1) == 1
    return {
        "best-looking, counted as attempt 1": best & (p_values <= level_of(1, CONFIDENCE)),
        "best-looking, counted by its place": best & (p_values <= levels),
        "all tried": p_values <= levels,
    }


def table(trials: int, gain: float) -> Iterator[list[str]]:
    """Rows with the share of trials in which a version is promoted; with a gain, the one that is better."""
    for num_prompts, redrawn in SHAPES:
        cells: dict[str, list[str]] = {}
        for count in COUNTS:
            for name, found in promoted(*p_values_of(trials, count, num_prompts, redrawn, gain)).items():
                share = found[:, 0].mean() if gain else found.any(axis=1).mean()
                cells.setdefault(name, []).append(f"{100 * share:.1f} %")
        for name, shares in cells.items():
            yield [f"{num_prompts} prompts, {redrawn:.0%} drawn again: {name}", *shares]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=2000)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/looks.md"))
    arguments = parser.parse_args()
    parts = [f"# The best-looking of K versions\n\n`python -m benchmarks.looks --trials {arguments.trials}`.\n"]
    titles = {0.0: "No version is better than its rival: one is promoted"}
    titles |= {gain: f"One of the K is better by {100 * gain:.0f} points: it is promoted" for gain in GAINS}
    for gain, title in titles.items():
        lines = [["", *(f"K = {count}" for count in COUNTS)], ["---"] * (len(COUNTS) + 1)]
        lines += table(arguments.trials, gain)
        parts.append(f"## {title}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n")
    arguments.output.write_text("\n".join(parts))


if __name__ == "__main__":
    main()
