"""Word problems and small functions together, and one base model that does some of each.

The prompts are those of the recipes maths and code; so are the demonstrations that the base has learnt from.
"""

from __future__ import annotations

import random
from pathlib import Path

from examples import tiny
from examples.code import make as code
from examples.maths import make as maths

STEPS = 900


def make(folder: Path) -> None:
    rng = random.Random(tiny.SEED)
    (problems, held_problems), (tasks, held_tasks) = maths.make_problems(), code.make_tasks()
    rows = {"maths": (map(maths.make_row, problems), map(maths.make_row, held_problems))}
    rows |= {"code": (map(code.make_row, tasks), map(code.make_row, held_tasks))}
    for name, (train, held) in rows.items():
        (folder / name).mkdir()
        tiny.write_rows(folder / name, [*train], [*held])
    demonstrations = [(maths.make_row(it)["prompt"], maths.demonstrate(it, rng)) for it in problems]
    demonstrations += [
        (code.make_row(it)["prompt"], code.demonstrate(it, rng)) for it in tasks for _ in range(code.REPEATS)
    ]
    tiny.make_base(folder / "base", demonstrations, STEPS)


if __name__ == "__main__":
    tiny.run(__file__, make)
