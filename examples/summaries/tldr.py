"""The real data of this recipe: TL;DR from the Hugging Face hub, its summaries in the column that `rouge` reads."""

from __future__ import annotations

from pathlib import Path

from examples import tiny

OUT = Path("storage", "examples", "tldr")
HELD_OUT = 500  # of 6,553 test posts


def make_row(row: dict[str, str]) -> dict[str, str]:
    """`completion` is the summary that the post's author wrote."""
    return {"prompt": row["prompt"], "reference": row["completion"]}


def main() -> None:
    from datasets import load_dataset

    splits = load_dataset("trl-lib/tldr")
    train = [make_row(row) for row in splits["train"]]
    held = [make_row(row) for row in splits["test"].select(range(HELD_OUT))]
    OUT.mkdir(parents=True, exist_ok=True)
    tiny.write_rows(OUT, train, held)
    print(f"{OUT}: train.parquet ({len(train)} posts), eval.parquet ({len(held)})")


if __name__ == "__main__":
    main()
