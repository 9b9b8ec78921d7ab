"""The real data of this recipe: UltraFeedback's questions from the Hugging Face hub, under a system prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from examples import tiny
from examples.dialogue.make import SYSTEM

OUT = Path("storage", "examples", "ultrafeedback")
HELD_OUT = 500


def make_row(row: dict[str, Any]) -> dict[str, Any]:
    """`prompt` is the user's message in a list."""
    return {"prompt": [{"role": "system", "content": SYSTEM}, *row["prompt"]]}


def main() -> None:
    from datasets import load_dataset

    splits = load_dataset("trl-lib/ultrafeedback-prompt")
    train = [make_row(row) for row in splits["train"]]
    held = [make_row(row) for row in splits["test"].select(range(HELD_OUT))]
    OUT.mkdir(parents=True, exist_ok=True)
    tiny.write_rows(OUT, train, held)
    print(f"{OUT}: train.parquet ({len(train)} questions), eval.parquet ({len(held)})")


if __name__ == "__main__":
    main()
