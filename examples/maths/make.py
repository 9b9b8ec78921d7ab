"""Word problems of one or two steps, and a base model that solves some and keeps the form now and then.

As GSM8K, in small: a question in words, a number as the answer. No held-out problem has the numbers of a training one.
"""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

from examples import tiny

TRAIN_ROWS, EVAL_ROWS = 3000, 150
STEPS = 700
FORMED = 0.3  # share of the demonstrations in the form that is asked for
SLIPS = 0.3  # share of the demonstrations whose last step comes out wrong
SYSTEM = "Use <think> and <answer> tags."
NAMES = ("Ada", "Ben", "Eva", "Kai", "Mia", "Tom")
THINGS = ("apples", "books", "coins", "eggs", "pens")
MORE, LESS = ("buys", "finds", "gets"), ("loses", "gives away", "sells")

Numbers = tuple[int, ...]  # how many there are at first, and each change


def make_problems(seed: int = tiny.SEED) -> tuple[list[Numbers], list[Numbers]]:
    """Training and held-out problems, no two alike; nothing in them falls below zero."""
    rng = random.Random(seed)
    problems: dict[Numbers, None] = {}
    while len(problems) < TRAIN_ROWS + EVAL_ROWS:
        changes = (rng.choice((-1, 1)) * rng.randint(1, 9) for _ in range(rng.randint(1, 2)))
        numbers = (rng.randint(2, 20), *changes)
        if min(itertools.accumulate(numbers)) >= 0:
            problems[numbers] = None
    return list(problems)[EVAL_ROWS:], list(problems)[:EVAL_ROWS]


def make_row(numbers: Numbers) -> dict[str, Any]:
    """A problem in words, the same for the same numbers."""
    rng = random.Random(repr(numbers))
    name, things = rng.choice(NAMES), rng.choice(THINGS)
    changes = " and ".join(f"{rng.choice(MORE if n > 0 else LESS)} {abs(n)}" for n in numbers[1:])
    question = f"{name} has {numbers[0]} {things}, then {changes}. How many now?"
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    return {"prompt": messages, "answer": str(sum(numbers))}


def demonstrate(numbers: Numbers, rng: random.Random) -> str:
    """A way to say it: in the form or not, right or with a slip in the last step."""
    totals = list(itertools.accumulate(numbers))
    if rng.random() < SLIPS:
        totals[-1] += rng.choice((-2, -1, 1, 2))
    steps = [f"{before}{n:+}={after}." for before, n, after in zip(totals, numbers[1:], totals[1:], strict=False)]
    thought = " ".join(steps)
    if rng.random() < FORMED:
        return f"<think>{thought}</think><answer>{totals[-1]}</answer>"
    return rng.choice((f"{thought} The answer is {totals[-1]}", f"<think>{thought} It is {totals[-1]}", f"{thought}"))


def make(folder: Path) -> None:
    train, held = make_problems()
    tiny.write_rows(folder, [make_row(numbers) for numbers in train], [make_row(numbers) for numbers in held])
    rng = random.Random(tiny.SEED)
    demonstrations = [(make_row(numbers)["prompt"], demonstrate(numbers, rng)) for numbers in train]
    tiny.make_base(folder / "base", demonstrations, STEPS)


if __name__ == "__main__":
    tiny.run(__file__, make)
