"""Word problems with numbers of three digits, and a base model that estimates, or writes a program for python.

No held-out problem has the numbers of a training one.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from examples import tiny

TRAIN_ROWS, EVAL_ROWS, DEMONSTRATIONS = 2000, 200, 5000
STEPS = 250
PROGRAMS = 0.3  # share of the demonstrations that write a program; the others estimate
SLIPS = 0.1  # share of the programs' operations with the wrong sign
NAMES = ("Ada", "Ben", "Eva", "Kai", "Mia", "Tom")
THINGS = ("apples", "books", "coins", "eggs", "pens")
MORE, LESS = ("buys", "finds", "gets"), ("loses", "eats", "sells")
LEAST, MOST = 100, 999

Numbers = tuple[int, int, int]  # how many there are at first, and two changes


def make_problems(seed: int = tiny.SEED) -> tuple[list[Numbers], list[Numbers]]:
    """Training and held-out problems, no two alike; all results have three digits."""
    rng = random.Random(seed)
    problems: dict[Numbers, None] = {}
    while len(problems) < TRAIN_ROWS + EVAL_ROWS:
        first, *changes = (rng.randint(LEAST, MOST) for _ in range(3))
        second, third = (rng.choice((-1, 1)) * change for change in changes)
        if LEAST <= first + second <= MOST and LEAST <= first + second + third <= MOST:
            problems[first, second, third] = None
    return list(problems)[EVAL_ROWS:], list(problems)[:EVAL_ROWS]


def make_row(numbers: Numbers) -> dict[str, Any]:
    """A problem in words, the same for the same numbers."""
    rng = random.Random(repr(numbers))
    name, things = rng.choice(NAMES), rng.choice(THINGS)
    first, *changes = numbers
    then = " and ".join(f"{rng.choice(MORE if n > 0 else LESS)} {abs(n)}" for n in changes)
    question = f"{name} has {first} {things}, then {then}. How many now?"
    return {"prompt": [{"role": "user", "content": question}], "answer": str(sum(numbers))}


def demonstrate(numbers: Numbers, rng: random.Random) -> str | list[tiny.Message]:
    """The numbers, and the sum of them rounded to hundreds; or a program, perhaps with a slip, what it prints, and that
    again. Both name the numbers: copying these is what takes long to learn."""
    first, *changes = numbers
    if rng.random() >= PROGRAMS:
        return f"{_written(first, changes)} is about {sum(round(n, -2) for n in numbers)}"
    done = [-n if rng.random() < SLIPS else n for n in changes]
    printed = str(first + sum(done))
    return [tiny.call("python", code=f"print({_written(first, done)})"), tiny.answer(f"{printed}\n"), tiny.say(printed)]


def _written(first: int, changes: Sequence[int]) -> str:
    return "".join([str(first), *(f"{n:+}" for n in changes)])


def make(folder: Path) -> None:
    train, held = make_problems()
    tiny.write_rows(folder, [make_row(numbers) for numbers in train], [make_row(numbers) for numbers in held])
    rng = random.Random(tiny.SEED)
    problems = [rng.choice(train) for _ in range(DEMONSTRATIONS)]
    demonstrations = [(make_row(numbers)["prompt"], demonstrate(numbers, rng)) for numbers in problems]
    tiny.make_base(folder / "base", demonstrations, STEPS)


if __name__ == "__main__":
    tiny.run(__file__, make)
