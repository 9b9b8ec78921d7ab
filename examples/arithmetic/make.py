"""Two-digit sums, and a base model of a million parameters that gets some of them right: `teach.py` has taught it."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

from examples import tiny

TRAIN_ROWS, EVAL_ROWS = 5000, 500
BASE = Path(__file__).parent / "base"

Row = dict[str, str]


def make_rows(seed: int = tiny.SEED) -> tuple[list[Row], list[Row]]:
    """Training and held-out sums; neither a held-out sum nor its mirror image (b+a) is ever trained on."""
    rng = random.Random(seed)
    pairs = [(a, b) for a in range(10, 100) for b in range(a, 100)]
    rng.shuffle(pairs)
    held_out = [rng.choice([(a, b), (b, a)]) for a, b in pairs[:EVAL_ROWS]]
    rest = sorted({sum_ for a, b in pairs[EVAL_ROWS:] for sum_ in ((a, b), (b, a))})
    trained = rng.sample(rest, TRAIN_ROWS)
    train, held = ([{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in sums] for sums in (trained, held_out))
    return train, held


def make(folder: Path) -> None:
    tiny.write_rows(folder, *make_rows())
    shutil.copytree(BASE, folder / BASE.name)


if __name__ == "__main__":
    tiny.run(__file__, make)
