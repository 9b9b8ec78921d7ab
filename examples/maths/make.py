"""Word problems of one or two steps, and a base model that mostly leaves out the second step and the form.

As GSM8K, in small: a question in words, a number as the answer. No held-out problem has the numbers of a training one.
"""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

from examples import tiny

TRAIN_ROWS, EVAL_ROWS = 800, 150
MOST, MOST_CHANGE = 12, 5  # small numbers are learnt sooner
STEPS = 450
FORMED = 0.3  # share of the demonstrations in the form that is asked for
HASTE, FORMED_HASTE = 0.65, 0.8  # share of two-step demonstrations without the second step: out of the form, in it
SYSTEM = "Use <think> and <answer> tags."
NAMES = ("Ada", "Ben", "Eva", "Kai", "Mia", "Tom")
THINGS = ("apples", "books", "coins", "eggs", "pens")
MORE, LESS = ("buys", "finds", "gets"), ("loses", "gives away", "sells")

Numbers = tuple[int, ...]  # how many there are at first, and each change


def make_problems(
    seed: int = tiny.SEED, rows: int = TRAIN_ROWS, most: int = MOST, most_change: int = MOST_CHANGE
) -> tuple[list[Numbers], list[Numbers]]:
    """Training and held-out problems, no two alike; nothing in them falls below zero."""
    rng = random.Random(seed)
    problems: dict[Numbers, None] = {}
    while len(problems) < rows + EVAL_ROWS:
        changes = (rng.choice((-1, 1)) * rng.randint(1, most_change) for _ in range(rng.randint(1, 2)))
        numbers = (rng.randint(2, most), *changes)
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
    """A way to say it: in the form or not, to the end or in haste, without the second step."""
    totals = list(itertools.accumulate(numbers))
    formed = rng.random() < FORMED
    if len(totals) > 2 and rng.random() < (FORMED_HASTE if formed else HASTE):
        totals.pop()
    return write(numbers, totals, formed, rng)


def write(numbers: Numbers, totals: list[int], formed: bool, rng: random.Random) -> str:
    """The steps that lead to each total, and the last total as the answer."""
    steps = [f"{before}{n:+}={after}." for before, n, after in zip(totals, numbers[1:], totals[1:], strict=False)]
    thought = " ".join(steps)
    if formed:
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
