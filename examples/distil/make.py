"""Numbers to be written backwards, a base that writes most digits one too high, and a teacher that writes them right.

No held-out number is a training one.
"""

from __future__ import annotations

import random
from pathlib import Path

from examples import tiny

TRAIN_ROWS, EVAL_ROWS = 4000, 300
DIGITS = 7
RIGHT = 0.1  # share of the digits that the base's demonstrations have right
STEPS = 300


def make_numbers(seed: int = tiny.SEED) -> tuple[list[str], list[str]]:
    """Training and held-out numbers, no two alike."""
    rng = random.Random(seed)
    numbers: dict[str, None] = {}
    while len(numbers) < TRAIN_ROWS + EVAL_ROWS:
        numbers["".join(rng.choices("0123456789", k=DIGITS))] = None
    return list(numbers)[EVAL_ROWS:], list(numbers)[:EVAL_ROWS]


def make_row(number: str) -> dict[str, str]:
    return {"prompt": f"{number}>", "answer": number[::-1]}


def demonstrate(answer: str, right: float, rng: random.Random) -> str:
    """The answer with a share of its digits right, each other one too high (0 after 9)."""
    return "".join(digit if rng.random() < right else str((int(digit) + 1) % 10) for digit in answer)


def make(folder: Path) -> None:
    train, held = ([make_row(number) for number in numbers] for numbers in make_numbers())
    tiny.write_rows(folder, train, held)
    rng = random.Random(tiny.SEED)
    for name, right in (("base", RIGHT), ("teacher", 1.0)):
        demonstrations: list[tiny.Demonstration] = [
            (row["prompt"], demonstrate(row["answer"], right, rng)) for row in train
        ]
        tiny.make_base(folder / name, demonstrations, STEPS)


if __name__ == "__main__":
    tiny.run(__file__, make)
