"""A million ordinary prompts held against the data contract: seconds, and the most memory the process held.

    python benchmarks/validate_million.py [--rows 1000000] [--conversations]

Reads Parquet and writes Parquet, as the validate stage does. A prompt is 20 to 79 seeded random words, with an answer;
5,000 more are held out. The model is a byte-level tokenizer with a context of 32,768.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import polars as pl

HELD_OUT = 5_000
CHUNK = 50_000


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the data contract.")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--conversations", action="store_true", help="a system and a user message instead of text")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        measure(arguments.measure)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_prompts(folder / "train.parquet", arguments.rows, 0, arguments.conversations)
        write_prompts(folder / "eval.parquet", HELD_OUT, arguments.rows, arguments.conversations)
        write_model(folder / "model")
        # In a process of its own, so that the memory is the check's alone.
        subprocess.run([sys.executable, __file__, "--measure", name], check=True)


def measure(folder: Path) -> None:
    from grpo_core.config.files import parse_config
    from tasks.data.rows import write_rows
    from tasks.validate import screen

    config = parse_config(
        {
            "name": "benchmark",
            "model": {"name_or_path": str(folder / "model")},
            "data": {"train": str(folder / "train.parquet"), "eval": str(folder / "eval.parquet")},
            "rewards": [{"function": "exact_match"}],
        }
    )
    start = time.perf_counter()
    screened = screen(config)
    for name, rows in screened.kept.items():
        write_rows(rows, folder / f"{name}.kept.parquet")
    seconds = time.perf_counter() - start
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    size = (folder / "train.parquet").stat().st_size / 2**20
    rows = screened.report["rows_read"]["train"]
    print(f"{rows:,} rows, {size:.0f} MiB of Parquet, findings: {screened.findings.height}")
    print(f"{seconds:.1f} s from loading the tokenizer, with transformers and torch, to the last row written")
    print(f"{memory:.2f} GiB at most")


def write_prompts(path: Path, rows: int, seed: int, conversations: bool) -> None:
    random = np.random.default_rng([seed, rows])
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    words = np.array(["".join(random.choice(letters, random.integers(2, 10))) for _ in range(5_000)])
    frames = []
    for start in range(0, rows, CHUNK):
        numbers = range(start, min(start + CHUNK, rows))
        texts = [f"{' '.join(random.choice(words, random.integers(20, 80)))} {seed + n}?" for n in numbers]
        frames.append(pl.DataFrame({"prompt": texts, "answer": [str(n % 97) for n in numbers]}))
    frame = pl.concat(frames)
    if conversations:
        system = pl.struct(role=pl.lit("system"), content=pl.lit("Answer in one word."))
        frame = frame.with_columns(prompt=pl.concat_list(system, pl.struct(role=pl.lit("user"), content="prompt")))
    frame.write_parquet(path)


def write_model(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen2Config

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(["the sum of two"], trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet))
    template = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}<|assistant|>"
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template).save_pretrained(folder)
    Qwen2Config(max_position_embeddings=32_768).save_pretrained(folder)


if __name__ == "__main__":
    main()
