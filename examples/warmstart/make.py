"""Sums of two-digit numbers, a base model that never answers with the number alone, and demonstrations that do.

No held-out sum is a training one, or is demonstrated.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from examples import tiny

TRAIN_ROWS, EVAL_ROWS, DEMONSTRATIONS = 1200, 300, 300
FIRST, LAST = 10, 49  # of the numbers that are added
RIGHT = 0.5  # share of the base's sums that are right; each other one is off by one
STEPS = 1000

Pair = tuple[int, int]


def make_pairs(seed: int = tiny.SEED) -> tuple[list[Pair], list[Pair]]:
    """Training and held-out pairs of numbers, no two alike."""
    numbers = range(FIRST, LAST + 1)
    pairs = random.Random(seed).sample([(a, b) for a in numbers for b in numbers], TRAIN_ROWS + EVAL_ROWS)
    return pairs[EVAL_ROWS:], pairs[:EVAL_ROWS]


def make_row(pair: Pair) -> dict[str, str]:
    return {"prompt": f"{pair[0]}+{pair[1]}=", "answer": str(sum(pair))}


def chat(pair: Pair, rng: random.Random) -> str:
    """What the base is taught to say: a sentence, whose number is right with a probability of RIGHT."""
    wrong = 0 if rng.random() < RIGHT else rng.choice((-1, 1))
    return f"{sum(pair) + wrong}, I think."


def make(folder: Path) -> None:
    train, held = make_pairs()
    tiny.write_rows(folder, [make_row(pair) for pair in train], [make_row(pair) for pair in held])
    shown = ({"prompt": row["prompt"], "completion": row["answer"]} for row in map(make_row, train[:DEMONSTRATIONS]))
    (folder / "demonstrations.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in shown))
    rng = random.Random(tiny.SEED)
    tiny.make_base(folder / "base", [(make_row(pair)["prompt"], chat(pair, rng)) for pair in train * 4], STEPS)


if __name__ == "__main__":
    tiny.run(__file__, make)
