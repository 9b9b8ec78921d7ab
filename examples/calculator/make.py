"""Products of three-digit numbers, and a base model that estimates them, and asks a calculator now and then.

The numbers are 317 or more, so that every product has six digits. No held-out product is a training one.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from examples import tiny

TRAIN_ROWS, EVAL_ROWS, DEMONSTRATIONS = 2000, 200, 4000
CALLS = 0.3  # share of the demonstrations that call the calculator; the others estimate
STEPS = 300
LOWEST, HIGHEST = 317, 999

Pair = tuple[int, int]


def make_pairs(seed: int = tiny.SEED) -> tuple[list[Pair], list[Pair]]:
    """Training and held-out factors, no two pairs alike, in either order."""
    rng = random.Random(seed)
    pairs: dict[Pair, None] = {}
    while len(pairs) < TRAIN_ROWS + EVAL_ROWS:
        a, b = rng.randint(LOWEST, HIGHEST), rng.randint(LOWEST, HIGHEST)
        if (b, a) not in pairs:
            pairs[a, b] = None
    return list(pairs)[EVAL_ROWS:], list(pairs)[:EVAL_ROWS]


def make_row(pair: Pair) -> dict[str, Any]:
    a, b = pair
    return {"prompt": [{"role": "user", "content": f"{a}*{b}"}], "answer": str(a * b)}


def demonstrate(pair: Pair, rng: random.Random) -> str | list[tiny.Message]:
    """The product of the factors rounded to hundreds; or a call of the calculator, its answer, and that again."""
    a, b = pair
    if rng.random() >= CALLS:
        return str(round(a, -2) * round(b, -2))
    product = str(a * b)
    return [tiny.call("calculator", expression=f"{a}*{b}"), tiny.answer(product), tiny.say(product)]


def make(folder: Path) -> None:
    train, held = make_pairs()
    tiny.write_rows(folder, [make_row(pair) for pair in train], [make_row(pair) for pair in held])
    rng = random.Random(tiny.SEED)
    pairs = [rng.choice(train) for _ in range(DEMONSTRATIONS)]
    tiny.make_base(folder / "base", [(make_row(pair)["prompt"], demonstrate(pair, rng)) for pair in pairs], STEPS)


if __name__ == "__main__":
    tiny.run(__file__, make)
