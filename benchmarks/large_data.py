"""Measures seconds and peak memory for a data set of many rows, from its file to the first updates of a training.

    python -m benchmarks.large_data [--rows 10_000_000] [--form parquet|jsonl] [--conversations] [--output FILE.json]

A prompt is 4 to 12 seeded random words, with an answer; 500 more are held out. `grpo data check` reads them with a
byte-level tokenizer and a context of 32,768; then `grpo run` does all stages, the training for two updates of a policy
of some thousand parameters.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow.parquet as pq
import tomli_w

from benchmarks.command import ROOT, python_path

HELD_OUT = 500
CHUNK = 100_000
NAME = "large"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--form", choices=("parquet", "jsonl"), default="parquet")
    parser.add_argument("--conversations", action="store_true", help="a system and a user message instead of text")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_prompts(folder / f"train.{arguments.form}", arguments.rows, 0, arguments.conversations)
        held_out = min(HELD_OUT, arguments.rows)
        write_prompts(folder / f"eval.{arguments.form}", held_out, arguments.rows, arguments.conversations)
        write_model(folder / "model")
        config = write_config(folder, arguments.form)
        commands = {"grpo data check": ["data", "check", config], "grpo run": ["run", config]}
        found: dict[str, Any] = {
            "command": f"python -m benchmarks.large_data --rows {arguments.rows} --form {arguments.form}",
            "machine": f"{os.cpu_count()} cores, {platform.processor() or platform.machine()}, no GPU",
            "rows": arguments.rows,
            "MiB of the file": round((folder / f"train.{arguments.form}").stat().st_size / 2**20),
        }
        for what, command in commands.items():
            found[what] = measured(command, folder)
            print(what, found[what], flush=True)
        run = folder / "storage" / "runs" / NAME
        receipts = {"validate": "dataset/report.json", "plan": "plan.json", "train": "training/result.json"}
        found["seconds of stages"] = {
            stage: json.loads((run / file).read_text())["seconds"] for stage, file in receipts.items()
        }
        if arguments.output:
            arguments.output.write_text(json.dumps(found, indent=2) + "\n")


def measured(command: list[str], folder: Path) -> dict[str, Any]:
    """Measure the seconds of a command, and the peak memory of it and its processes."""
    code = (
        "import resource, subprocess, sys\n"
        "done = subprocess.run(sys.argv[1:])\n"
        "print('KIB', resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)\n"
        "sys.exit(done.returncode)"
    )
    begun = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", code, sys.executable, "-m", "flows.cli.main", *command],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": python_path(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    size = next(int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("KIB "))
    return {"seconds": round(time.perf_counter() - begun, 1), "GiB at most": round(size / 2**20, 2)}


def write_config(folder: Path, form: str) -> str:
    values = {
        "name": NAME,
        "model": {"name_or_path": str(folder / "model")},
        "data": {"train": str(folder / f"train.{form}"), "eval": str(folder / f"eval.{form}")},
        "rewards": [{"function": "exact_match"}],
        "rollout": {"max_completion_length": 8},
        "train": {"max_steps": 2, "per_device_train_batch_size": 32},
    }
    path = folder / "large.toml"
    path.write_text(tomli_w.dumps(values))
    return str(path)


def write_prompts(path: Path, rows: int, seed: int, conversations: bool) -> None:
    random, words, writer = np.random.default_rng([seed, rows]), np.array(make_words()), None
    for start in range(0, rows, CHUNK):
        numbers = range(start, min(start + CHUNK, rows))
        drawn, lengths = words[random.integers(0, len(words), (len(numbers), 12))], random.integers(4, 13, len(numbers))
        texts = [f"{' '.join(own[:n])} {seed + k}?" for own, n, k in zip(drawn, lengths, numbers, strict=True)]
        frame = pl.DataFrame({"prompt": texts, "answer": [str(n % 97) for n in numbers]})
        if conversations:
            system = pl.struct(role=pl.lit("system"), content=pl.lit("Answer in one word."))
            frame = frame.with_columns(prompt=pl.concat_list(system, pl.struct(role=pl.lit("user"), content="prompt")))
        if path.suffix == ".jsonl":
            with path.open("ab") as file:
                frame.write_ndjson(file)
            continue
        table = frame.to_arrow(compat_level=pl.CompatLevel.oldest())
        writer = writer or pq.ParquetWriter(path, table.schema, compression="zstd")
        writer.write_table(table)
    if writer:
        writer.close()


def make_words() -> list[str]:
    random, letters = np.random.default_rng(0), np.array(list("abcdefghijklmnopqrstuvwxyz"))
    return ["".join(random.choice(letters, random.integers(2, 10))) for _ in range(5_000)]


def write_model(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=8_000, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<end>"]
    )
    tokenizer.train_from_iterator([" ".join(make_words())], trainer)
    template = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}<|assistant|>"
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, chat_template=template, eos_token="<end>", pad_token="<end>"
    ).save_pretrained(folder)
    small = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = Qwen2Config(
        vocab_size=len(tokenizer.get_vocab()), num_hidden_layers=1, max_position_embeddings=32_768, **small
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)


if __name__ == "__main__":
    main()
