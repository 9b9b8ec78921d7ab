"""Word problems and small functions together, and one base model that does some of each.

The prompts are like those of the recipes maths and code, with larger numbers in the word problems.
"""

from __future__ import annotations

import itertools
import random
from pathlib import Path

from examples import tiny
from examples.code import make as code
from examples.maths import make as maths

STEPS = 900
PROBLEMS = {"rows": 3000, "most": 20, "most_change": 9}
SLIPS = 0.3  # share of the worked problems whose last step comes out wrong


def work_out(numbers: maths.Numbers, rng: random.Random) -> str:
    """A problem worked out: in the form or not, right or with a slip in the last step."""
    totals = list(itertools.accumulate(numbers))
    if rng.random() < SLIPS:
        totals[-1] += rng.choice((-2, -1, 1, 2))
    return maths.write(numbers, totals, rng.random() < maths.FORMED, rng)


def make(folder: Path) -> None:
    rng = random.Random(tiny.SEED)
    (problems, held_problems), (tasks, held_tasks) = maths.make_problems(**PROBLEMS), code.make_tasks()
    rows = {"maths": (map(maths.make_row, problems), map(maths.make_row, held_problems))}
    rows |= {"code": (map(code.make_row, tasks), map(code.make_row, held_tasks))}
    for name, (train, held) in rows.items():
        (folder / name).mkdir()
        tiny.write_rows(folder / name, [*train], [*held])
    demonstrations = [(maths.make_row(it)["prompt"], work_out(it, rng)) for it in problems]
    demonstrations += [
        (code.make_row(it)["prompt"], code.demonstrate(it, rng)) for it in tasks for _ in range(code.REPEATS)
    ]
    tiny.make_base(folder / "base", demonstrations, STEPS)


if __name__ == "__main__":
    tiny.run(__file__, make)
