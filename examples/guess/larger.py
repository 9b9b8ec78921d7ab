"""The larger form of this recipe: numbers up to 1000, for a model that reads what it is asked."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from examples import tiny

OUT = Path("storage", "examples", "guess-larger")
TRAIN_ROWS, EVAL_ROWS, HIGHEST = 2000, 300, 1000


def make_rows(seed: int = tiny.SEED) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Training and held-out games, no two of the same range."""
    rng = random.Random(seed)
    rows: dict[str, dict[str, Any]] = {}
    while len(rows) < TRAIN_ROWS + EVAL_ROWS:
        low = rng.randint(1, HIGHEST // 2)
        high = rng.randint(low + 100, HIGHEST)
        asked = (
            f"I have a number from {low} to {high} in mind. Find it with the tool guess, in as few guesses as you can."
        )
        columns = {"secret": rng.randint(low, high), "low": low, "high": high}
        rows[asked] = {"prompt": [{"role": "user", "content": asked}], **columns}
    made = list(rows.values())
    return made[EVAL_ROWS:], made[:EVAL_ROWS]


def main() -> None:
    train, held = make_rows()
    OUT.mkdir(parents=True, exist_ok=True)
    tiny.write_rows(OUT, train, held)
    print(f"{OUT}: train.parquet ({len(train)} games), eval.parquet ({len(held)})")


if __name__ == "__main__":
    main()
