"""The real data of this recipe: MBPP from the Hugging Face hub.

A task shows its first test and is scored by the others: a program that knows that one answer alone gets nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from examples import tiny

OUT = Path("storage", "examples", "mbpp")


def make_row(row: dict[str, Any]) -> dict[str, Any]:
    shown, *tests = row["test_list"]
    asked = f"{row['text']}\nYour code has to pass this test:\n{shown}\nAnswer with one Python code block."
    return {"prompt": [{"role": "user", "content": asked}], "tests": tests}


def main() -> None:
    from datasets import load_dataset

    # A few tasks need code before their tests, which the reward does not run.
    splits = load_dataset("google-research-datasets/mbpp", "full").filter(lambda row: not row["test_setup_code"])
    OUT.mkdir(parents=True, exist_ok=True)
    tiny.write_rows(OUT, [make_row(row) for row in splits["train"]], [make_row(row) for row in splits["test"]])
    print(f"{OUT}: train.parquet ({len(splits['train'])} tasks), eval.parquet ({len(splits['test'])})")


if __name__ == "__main__":
    main()
