"""Simulates how often a sweep that compares settings by seeds errs.

    python -m benchmarks.seeds [--trials 2000] [--output benchmarks/results/seeds.md]

Writes the tables that docs/how-to/sweep.md refers to. Seeded: the same trials give the same tables.

Each training's gain over the base model is drawn from the same law for all settings, so that every setting is the best:
"all hold" is the share of sweeps in which each setting's interval covers the mean of the law, "best kept" that in which
the setting which stands for the best is among those that may be it (`tasks.reports.sweep`).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np

from grpo_core.evaluation.statistics import seed_difference

CONFIDENCE = 0.95
SEEDS = (2, 3, 5)
SETTINGS = (3, 6)
Draw = Callable[[np.random.Generator, tuple[int, int]], np.ndarray]


def collapsing(share: float) -> Draw:
    """Draw gains of which a share is a collapse by 50 points; the others lie within 2."""
    return lambda rng, shape: np.where(rng.random(shape) < share, -0.5, rng.uniform(-0.02, 0.02, shape))


LAWS: dict[str, tuple[Draw, float]] = {  # and the mean
    "normal": (lambda rng, shape: rng.normal(0, 0.02, shape), 0.0),
    "Student's t, 3 degrees of freedom": (lambda rng, shape: 0.02 * rng.standard_t(3, shape), 0.0),
    "lognormal": (lambda rng, shape: 0.02 * rng.lognormal(size=shape), 0.02 * float(np.exp(0.5))),
    "10 % collapse": (collapsing(0.1), -0.05),
    "25 % collapse": (collapsing(0.25), -0.125),
    "half of them learn nothing": (lambda rng, shape: 0.5 * (rng.random(shape) < 0.5) + 0.0, 0.25),
}


def shares(draw: Draw, mean: float, settings: int, seeds: int, trials: int) -> tuple[float, float]:
    """Share of sweeps in which all intervals hold, and in which the best setting is kept."""
    rng, base = np.random.default_rng([settings, seeds]), [0.0] * seeds
    of_each, of_rivals = (1 - CONFIDENCE) / settings, (1 - CONFIDENCE) / (settings - 1)
    hold = kept = 0
    for _ in range(trials):
        gains = draw(rng, (settings, seeds))
        intervals = [seed_difference(base, own, 1 - of_each) for own in gains]
        # Without spread there is no interval, which covers nothing.
        hold += all(it.low <= mean <= it.high for it in intervals)
        better = [own for own in gains[1:] if own.mean() > gains[0].mean()]
        kept += not any(seed_difference(gains[0], own, 1 - of_rivals).p_value <= of_rivals for own in better)
    return hold / trials, kept / trials


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=2000)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/seeds.md"))
    arguments = parser.parse_args()
    cases = [(settings, seeds) for settings in SETTINGS for seeds in SEEDS]
    lines = [["", *(f"{settings} settings, {seeds} seeds" for settings, seeds in cases)], ["---"] * (len(cases) + 1)]
    for law, (draw, mean) in LAWS.items():
        found = [shares(draw, mean, *case, arguments.trials) for case in cases]
        for place, what in enumerate(("all hold", "best kept")):
            lines.append([f"{law}: {what}", *(f"{100 * each[place]:.0f} %" for each in found)])
        print(law, flush=True)
    title = f"# Settings compared by seeds\n\n`python -m benchmarks.seeds --trials {arguments.trials}`, at 95 %.\n\n"
    arguments.output.write_text(title + "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n")


if __name__ == "__main__":
    main()
