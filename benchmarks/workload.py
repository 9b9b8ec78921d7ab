"""Inputs of both sides of a comparison: a model folder, prompts, rewards and, for a replay, completions.

They depend only on the workload and its seed, not on a side.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.command import ROOT, python_path
from grpo_core.rewards.builtin.answers import numeric_match

END, PAD = 0, 1
FIRST = 2  # the first ordinary token
BYTES = 256
SIGMA = 0.6  # of the logarithm of completion lengths


@dataclass(frozen=True)
class Workload:
    """A workload: `steps` updates, each of `prompts` prompts with `group` completions; random tasks have no more
    prompts."""

    hidden: int = 256
    intermediate: int = 768
    layers: int = 6
    heads: int = 4
    kv_heads: int = 2
    vocabulary: int = 4096
    prompts: int = 8
    prompt_lengths: tuple[int, int] = (16, 192)  # tokens, uniform
    group: int = 8
    completion: int = 128  # tokens at most
    task: Literal["random", "sums"] = "random"  # random weights and prompts, or the quickstart's model and sums
    mode: Literal["generate", "replay"] = "replay"  # sampled by each side, or the same stored completions for both
    silent: float = 0.0  # share of the prompts whose completions all have the same reward
    steps: int = 4
    warm_up: int = 1  # steps that are not counted
    seed: int = 0

    @property
    def completions(self) -> int:
        return self.prompts * self.group


SUMS = Path("storage", "examples", "arithmetic")  # where the quickstart has them


def write(workload: Workload, folder: Path) -> None:
    """Write model/, prompts.parquet, completions.json and workload.json."""
    folder.mkdir(parents=True)
    if workload.task == "sums":
        make = [sys.executable, "-m", "examples.arithmetic.make", "--out", SUMS.resolve()]
        subprocess.run(make, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": python_path(ROOT)})
        (folder / "model").symlink_to(SUMS.resolve() / "base")
        (folder / "prompts.parquet").symlink_to(SUMS.resolve() / "train.parquet")
    else:
        _write_model(workload, folder / "model")
        pq.write_table(pa.table(_prompts(workload)), folder / "prompts.parquet")
    if workload.mode == "replay":
        (folder / "completions.json").write_text(json.dumps(stored_completions(workload)))
    (folder / "workload.json").write_text(json.dumps(asdict(workload)))


def read(folder: Path) -> Workload:
    return Workload(**json.loads((folder / "workload.json").read_text()))


def reward(workload: Workload) -> Callable[..., Sequence[float | None]]:
    """Reward function that both sides call."""
    return spread if workload.task == "random" else right


def right(completions: list[str], answer: list[str], **_: Any) -> list[float | None]:
    """Reward a correct sum. TRL passes all columns, which are ignored here."""
    return numeric_match(completions, answer)


def spread(completion_ids: list[list[int]], silent: list[bool], **_: Any) -> list[float]:
    """Reward that differs within a group, except for prompts that should give no signal."""
    return [0.0 if quiet else sum(ids) % 11 / 10 for ids, quiet in zip(completion_ids, silent, strict=True)]


def stored_completions(workload: Workload) -> list[list[list[list[int]]]]:
    """Token ids by step, prompt and member of the group; lengths are log-normal and cut off. The first completion of
    each step has the greatest length, so that the warm-up includes it."""
    generator = np.random.default_rng(workload.seed)
    shape = (workload.steps, workload.prompts, workload.group)
    median = workload.completion * 0.35
    lengths = np.clip(generator.lognormal(np.log(median), SIGMA, shape).round(), 1, workload.completion).astype(int)
    lengths[:, 0, 0] = workload.completion
    return [
        [
            [_completion(generator, int(length), workload) for length in lengths[step, prompt]]
            for prompt in range(workload.prompts)
        ]
        for step in range(workload.steps)
    ]


def training_flops(workload: Workload) -> float:
    """Floating-point operations that a step of a replay needs, each token once: mean over the counted steps.

    6 per parameter and token, for the output layer only on completion tokens; for attention, 12 · layers · hidden per
    pair of a token and one that it attends to. Rows without a signal need none.
    """
    head = workload.vocabulary * workload.hidden
    size = workload.hidden // workload.heads
    attention = 2 * workload.hidden**2 + 2 * workload.hidden * workload.kv_heads * size
    body = workload.layers * (attention + 3 * workload.hidden * workload.intermediate)
    prompts = [len(text) for text, quiet in zip(*_prompts(workload).values(), strict=True) if not quiet]
    first = workload.prompts - len(prompts)
    steps = stored_completions(workload)[workload.warm_up :]
    total = 0.0
    for step in steps:
        for prompt, group in zip(prompts, step[first:], strict=True):
            lengths = [len(ids) for ids in group]
            tokens = prompt + sum(length - 1 for length in lengths)
            pairs = prompt**2 / 2 + sum((length - 1) * (prompt + length / 2) for length in lengths)
            total += 6 * (body * tokens + head * sum(lengths)) + 12 * workload.layers * workload.hidden * pairs
    return total / len(steps)


def _completion(generator: np.random.Generator, length: int, workload: Workload) -> list[int]:
    ids = generator.integers(FIRST, FIRST + BYTES, length).tolist()
    return ids if length == workload.completion else [*ids[:-1], END]


def _prompts(workload: Workload) -> dict[str, list[Any]]:
    """Columns of the data set: one character per token, and whether the prompt's rewards are all the same."""
    draw = random.Random(workload.seed)
    low, high = workload.prompt_lengths
    # The first has the greatest length; each begins with its number, so that no two are equal.
    lengths = [high, *(draw.randint(low, high) for _ in range(workload.prompts - 1))]
    texts = [
        f"{number:04d}" + "".join(chr(draw.randrange(33, 127)) for _ in range(length - 4))
        for number, length in enumerate(lengths)
    ]
    quiet = [number < workload.silent * workload.prompts for number in range(workload.prompts)]
    return {"prompt": texts, "silent": quiet}


def _write_model(workload: Workload, folder: Path) -> None:
    import torch
    from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(workload.seed)
    tokenizer = _tokenizer(workload)
    ids: dict[str, Any] = {"bos_token_id": None, "eos_token_id": END, "pad_token_id": PAD}
    config = Qwen2Config(
        vocab_size=workload.vocabulary,
        hidden_size=workload.hidden,
        intermediate_size=workload.intermediate,
        num_hidden_layers=workload.layers,
        num_attention_heads=workload.heads,
        num_key_value_heads=workload.kv_heads,
        max_position_embeddings=max(8192, workload.prompt_lengths[1] + workload.completion),
        tie_word_embeddings=True,
        dtype="float32",
        **ids,
    )
    model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(do_sample=True, **ids)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _tokenizer(workload: Workload) -> Any:
    """Tokenizer with one token per byte, and names for the rest of the vocabulary."""
    from transformers import Qwen2Tokenizer
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    names = ["<end>", "<pad>", *bytes_to_unicode().values()]
    names += [f"<{number}>" for number in range(len(names), workload.vocabulary)]
    vocabulary = {name: number for number, name in enumerate(names)}
    return Qwen2Tokenizer(
        vocab=vocabulary, merges=[], eos_token="<end>", pad_token="<pad>", unk_token="<end>", padding_side="left"
    )
