"""The larger form of this recipe: sums and products of numbers that a model of three billion parameters gets wrong."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from examples import tiny

OUT = Path("storage", "examples", "calculator-larger")
TRAIN_ROWS, EVAL_ROWS = 4000, 500


def make_row(rng: random.Random) -> dict[str, Any]:
    a, b, c = rng.randint(10_000, 99_999), rng.randint(1_000, 99_999), rng.randint(100_000, 9_999_999)
    sign = rng.choice("+-")
    asked = f"What is {a:,} × {b:,} {sign} {c:,}? End with the number."
    return {"prompt": [{"role": "user", "content": asked}], "answer": str(a * b + (c if sign == "+" else -c))}


def make_rows(seed: int = tiny.SEED) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    rng = random.Random(seed)
    rows = {row["answer"]: row for row in (make_row(rng) for _ in range(2 * (TRAIN_ROWS + EVAL_ROWS)))}
    made = list(rows.values())
    return made[EVAL_ROWS : EVAL_ROWS + TRAIN_ROWS], made[:EVAL_ROWS]


def main() -> None:
    train, held = make_rows()
    OUT.mkdir(parents=True, exist_ok=True)
    tiny.write_rows(OUT, train, held)
    print(f"{OUT}: train.parquet ({len(train)} problems), eval.parquet ({len(held)})")


if __name__ == "__main__":
    main()
