"""The real data of this recipe: prompts of r/WritingPrompts (arXiv:1805.04833) from the Hugging Face hub."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from examples import tiny

OUT = Path("storage", "examples", "writingprompts")
TRAINED, HELD_OUT = 5000, 200
TAG = re.compile(r"^\s*\[\s*WP\s*\]\s*")  # other tags ask for something else than a story


def make_row(prompt: str) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": f"Write a story of about 200 words. {TAG.sub('', prompt)}"}]}


def main() -> None:
    from datasets import load_dataset

    splits = load_dataset("euclaise/writingprompts")
    asked = {  # a prompt has a row for each story that was told to it
        name: [prompt for prompt in dict.fromkeys(splits[name]["prompt"]) if TAG.match(prompt)]
        for name in ("train", "test")
    }
    train, held = asked["train"][:TRAINED], asked["test"][:HELD_OUT]
    OUT.mkdir(parents=True, exist_ok=True)
    tiny.write_rows(OUT, [make_row(prompt) for prompt in train], [make_row(prompt) for prompt in held])
    print(f"{OUT}: train.parquet ({len(train)} prompts), eval.parquet ({len(held)})")


if __name__ == "__main__":
    main()
