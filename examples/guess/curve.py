"""Guesses per game of a training, update by update, beside the optimal strategy, as a picture.

python -m examples.guess.curve [storage/runs/guess] [--output guess.png]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import mean
from typing import Any

from examples.guess.game import MOST_GUESSES
from examples.guess.make import HIGHEST, LOWEST, middle, play
from tasks.rendering.drawing import BLUE, GREEN, GREY, Points, plot, png

NUMBERS = range(LOWEST, HIGHEST + 1)
BEST = mean(len(play(secret, middle)) for secret in NUMBERS)
RANDOM = sum((1 - 1 / len(NUMBERS)) ** missed for missed in range(MOST_GUESSES + 1))


def main() -> None:
    parser = argparse.ArgumentParser(prog="examples.guess.curve", description=str(__doc__).partition(",")[0])
    parser.add_argument(
        "run", type=Path, nargs="?", default=Path("storage", "runs", "guess"), help="directory of a run"
    )
    parser.add_argument("--output", type=Path, default=Path("guess.png"), help="default guess.png")
    options = parser.parse_args()
    metrics: Path = options.run / "training" / "metrics.jsonl"
    if not metrics.is_file():
        parser.error(f"there is no {metrics}; name the directory of a run that has trained")
    lines = metrics.read_text().splitlines()
    options.output.write_bytes(draw([(row["step"], guesses(row["reward"])) for row in map(json.loads, lines)]))
    print(f"wrote {options.output}")


def guesses(reward: float) -> float:
    """Guesses per game, by the games' mean reward; a number that is not found counts as one guess more than allowed."""
    return 1 + MOST_GUESSES * (1 - reward)


def draw(points: Points) -> bytes:
    """The curve over (update, guesses per game)."""

    def panel(figure: Any) -> None:
        axes = figure.subplots()
        ends = points[0][0], points[-1][0]
        plot(axes, {"in training": points}, [BLUE], legend=False)
        for value, colour in [(RANDOM, GREY), (BEST, GREEN)]:
            axes.plot(ends, (value, value), color=colour, linestyle="--")
        beside = {"textcoords": "offset points"}
        axes.annotate(f"random guesses: {RANDOM:.2f}", (ends[1], RANDOM), (0, -11), ha="right", **beside)
        axes.annotate(f"binary search, the best: {BEST:.2f}", (ends[0], BEST), (0, 3), ha="left", **beside)
        axes.set(title="guesses per game")

    return png((6, 2.8), panel)


if __name__ == "__main__":
    main()
