"""The real data of this recipe: GSM8K from the Hugging Face hub, to be solved by programs, its answers as numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from examples import tiny

OUT = Path("storage", "examples", "gsm8k-python")
SYSTEM = "Compute with the tool python. End with the number."


def make_row(row: dict[str, str]) -> dict[str, Any]:
    """GSM8K's `answer` is a solution whose last line is "#### 1,234"."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": row["question"]}]
    return {"prompt": messages, "answer": row["answer"].rpartition("####")[2].strip().replace(",", "")}


def main() -> None:
    from datasets import load_dataset

    splits = load_dataset("openai/gsm8k", "main")
    OUT.mkdir(parents=True, exist_ok=True)
    tiny.write_rows(OUT, [make_row(row) for row in splits["train"]], [make_row(row) for row in splits["test"]])
    print(f"{OUT}: train.parquet ({len(splits['train'])} problems), eval.parquet ({len(splits['test'])})")


if __name__ == "__main__":
    main()
