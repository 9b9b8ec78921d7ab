"""Sums of two-digit numbers, a base that has hardly begun to learn them, and a teacher that was taught longer.

No held-out sum, nor its mirror image, is a training one. Both models begin alike and see the same demonstrations, which
are all right.
"""

from __future__ import annotations

import random
from pathlib import Path

from examples import tiny

TRAIN_ROWS, EVAL_ROWS = 4000, 300
BASE_STEPS, TEACHER_STEPS = 300, 2000

Pair = tuple[int, int]


def make_pairs(seed: int = tiny.SEED) -> tuple[list[Pair], list[Pair]]:
    """Training and held-out summands."""
    rng = random.Random(seed)
    pairs = [(a, b) for a in range(10, 100) for b in range(a, 100)]
    rng.shuffle(pairs)
    held = [rng.choice([(a, b), (b, a)]) for a, b in pairs[:EVAL_ROWS]]
    rest = sorted({pair for a, b in pairs[EVAL_ROWS:] for pair in ((a, b), (b, a))})
    return rng.sample(rest, TRAIN_ROWS), held


def make_row(pair: Pair) -> dict[str, str]:
    a, b = pair
    return {"prompt": f"{a}+{b}=", "answer": str(a + b)}


def make(folder: Path) -> None:
    train, held = ([make_row(pair) for pair in pairs] for pairs in make_pairs())
    tiny.write_rows(folder, train, held)
    demonstrations: list[tiny.Demonstration] = [(row["prompt"], row["answer"]) for row in train]
    tiny.make_base(folder / "base", demonstrations, BASE_STEPS)
    tiny.make_base(folder / "teacher", demonstrations, TEACHER_STEPS)


if __name__ == "__main__":
    tiny.run(__file__, make)
