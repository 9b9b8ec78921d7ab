"""Measures how long a training stands still for a checkpoint, and how much slower updates are while one is written.

    python -m benchmarks.checkpoints FOLDER [--tiny]
    ACCELERATE_USE_CPU=true torchrun --nproc-per-node 2 -m benchmarks.checkpoints FOLDER

FOLDER is on the disk to measure. A model of 120 million parameters and its moments in float32, 1.4 GB, are written
twice per round: while the training waits, and while it continues. Several processes share the model.
"""

from __future__ import annotations

import argparse
import shutil
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, Qwen2Config

from benchmarks.command import parse
from benchmarks.vs_trl import hardware
from grpo_core.config.files import parse_config
from grpo_core.distributed import shard_mesh, start_processes, wait_for_all
from grpo_core.training import checkpoint_write
from grpo_core.training.checkpoint import Checkpoints
from grpo_core.training.state import TrainingState
from tests.conftest import config_values

WAYS = ("waits", "goes on")
UPDATES = 3  # before each checkpoint


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.checkpoints", description="What a checkpoint costs in time.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parse(parser)
    accelerator = start_processes(timedelta(hours=1))
    torch.set_num_threads(max(1, torch.get_num_threads() // accelerator.num_processes))
    shape = Qwen2Config(vocab_size=32_000, hidden_size=640, intermediate_size=2560, num_hidden_layers=12)
    if arguments.tiny:
        shape.update({"vocab_size": 320, "hidden_size": 40, "intermediate_size": 80})
    shape.num_attention_heads = shape.num_key_value_heads = 10
    model = AutoModelForCausalLM.from_config(shape)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if accelerator.num_processes > 1:
        for module in (*model.model.layers, model):
            fully_shard(module, mesh=shard_mesh(within_machine=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    config = parse_config(config_values(Path("model"), Path("data")))
    folder = arguments.folder / "checkpoints"
    checkpoints = Checkpoints(folder, "benchmark", config, accelerator, model, optimizer, None)
    timed(partial(update, model, optimizer))
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for number in range(arguments.rounds):
        for way in WAYS if number % 2 == 0 else reversed(WAYS):
            found[way].append(measured(checkpoints, goes_on=way == "goes on"))
    if accelerator.is_main_process:
        print(f"{accelerator.num_processes} processes on {hardware()}, {parameters / 1e6:.0f} million parameters")
        for name in found["waits"][0]:
            seconds = "".join(f"{way:>9} {median(it[name] for it in found[way]):6.2f}" for way in WAYS)
            print(f"{name:44}{seconds}")
    wait_for_all()
    shutil.rmtree(folder, ignore_errors=True)
    accelerator.end_training()


def measured(checkpoints: Checkpoints, *, goes_on: bool) -> dict[str, float]:
    """Measure the seconds around one checkpoint."""
    one = partial(update, checkpoints.model, checkpoints.optimizer)
    alone = [timed(one) for _ in range(UPDATES)]
    with mock.patch.object(checkpoint_write, "MOST_OF_MEMORY", checkpoint_write.MOST_OF_MEMORY if goes_on else 0.0):
        start = time.perf_counter()
        stands_still = timed(lambda: checkpoints.save(TrainingState(tokens_per_pass=1, updates=1), keep=1))
    meanwhile = [timed(one) for _ in range(UPDATES)]
    waits = timed(checkpoints.wait)
    return {
        "s per update, alone": median(alone),
        "s that the training stands still": stands_still,
        f"s for {UPDATES} updates after it": sum(meanwhile),
        "s that it waits for the rest": waits,
        f"s in all for checkpoint and {UPDATES} updates": time.perf_counter() - start,
    }


def update(model: Any, optimizer: torch.optim.Optimizer) -> None:
    tokens = torch.arange(2 * 32).view(2, 32)
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def timed(work: Any) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
