"""Small functions to write in Python, unit tests for each, and a base model whose programs are often wrong.

As MBPP, in small: a task in words, calls of the function with what they return. No held-out task is a training one.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from examples import tiny

EVAL_ROWS = 100
REPEATS = 6  # demonstrations of a training task
STEPS = 250
SLIPS = 0.5  # share of the demonstrations with something wrong
TRIED = (0, 1, 7)  # what a function is called with
# In words, in Python, and what it comes to.
STEP: dict[str, tuple[str, str, Callable[[int, int], int]]] = {
    "+": ("add {n}", "x + {n}", lambda x, n: x + n),
    "-": ("subtract {n}", "x - {n}", lambda x, n: x - n),
    "*": ("multiply by {n}", "x * {n}", lambda x, n: x * n),
}
Task = tuple[tuple[str, int], ...]  # operations with their numbers, in order


def make_tasks(seed: int = tiny.SEED) -> tuple[list[Task], list[Task]]:
    """Training and held-out tasks: all of one operation, and all of two different ones, with numbers from 2 to 9."""
    single = list(itertools.product(STEP, range(2, 10)))
    tasks: list[Task] = [(step,) for step in single]
    tasks += [(first, second) for first in single for second in single if first[0] != second[0]]
    random.Random(seed).shuffle(tasks)
    return tasks[EVAL_ROWS:], tasks[:EVAL_ROWS]


def make_row(task: Task) -> dict[str, Any]:
    said = ", then ".join(STEP[sign][0].format(n=n) for sign, n in task)
    messages = [{"role": "user", "content": f"Write f(x) in Python: {said}."}]
    return {"prompt": messages, "tests": [f"assert f({x}) == {_result(task, x)}" for x in TRIED]}


def demonstrate(task: Task, rng: random.Random) -> str:
    """A program: right, or with a wrong sign, its lines in the wrong order, a colon missing, or no code block."""
    slip = rng.choice(("sign", "order", "colon", "block")) if rng.random() < SLIPS else None
    steps = [(rng.choice([*STEP]) if slip == "sign" else sign, n) for sign, n in task]
    lines = [f"    x = {STEP[sign][1].format(n=n)}" for sign, n in (reversed(steps) if slip == "order" else steps)]
    program = "\n".join([f"def f(x){'' if slip == 'colon' else ':'}", *lines, "    return x"])
    return program if slip == "block" else f"```python\n{program}\n```"


def make(folder: Path) -> None:
    train, held = make_tasks()
    tiny.write_rows(folder, [make_row(task) for task in train], [make_row(task) for task in held])
    rng = random.Random(tiny.SEED)
    demonstrations = [(make_row(task)["prompt"], demonstrate(task, rng)) for task in train for _ in range(REPEATS)]
    tiny.make_base(folder / "base", demonstrations, STEPS, context=96)


def _result(task: Task, x: int) -> int:
    for sign, n in task:
        x = STEP[sign][2](x, n)
    return x


if __name__ == "__main__":
    tiny.run(__file__, make)
