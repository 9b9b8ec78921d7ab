"""Measures the cost of isolation per batch: runs a trivial function in the training's process and in its own.

    python -m benchmarks.isolated [--batches 200]

Completions are 2,000 characters each; a reward that reads no token ids, and one that reads 500 per completion.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch  # noqa: F401  as in a training: the state of its random numbers is carried over too

from grpo_core.config.inputs import RewardConfig
from grpo_core.rewards.batch import Batch
from grpo_core.rewards.contract import resolve
from grpo_core.rewards.isolated import RewardProcess
from grpo_core.rewards.scoring import score

REWARDS = {"reads texts": ("char_length", 20), "reads token ids": ("length", 20)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.isolated", description="Milliseconds per batch.")
    parser.add_argument("--batches", type=int, default=200)
    batches = parser.parse_args().batches
    for size in (8, 64, 512):
        texts = [f"{number:02000}" for number in range(size)]
        batch = Batch([{"prompt": text[-20:]} for text in texts], texts, [[*range(1000, 1500)] for _ in texts])
        for kind, (function, target) in REWARDS.items():
            times = [_milliseconds(function, target, isolated, batch, batches) for isolated in (False, True)]
            print(f"{size:4} completions, {kind:15}: {times[0]:6.2f} ms here, {times[1]:6.2f} ms isolated", flush=True)
    process = RewardProcess(RewardConfig(function="length", isolated=True))
    start = time.perf_counter()
    process.start()
    print(f"starting the process: {time.perf_counter() - start:.2f} s")


def _milliseconds(function: str, target: int, isolated: bool, batch: Batch, batches: int) -> float:
    reward = resolve(RewardConfig(function=function, args={"target": target}, isolated=isolated))
    times = []
    for _ in range(batches):
        start = time.perf_counter()
        score([reward], batch)
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


if __name__ == "__main__":
    main()
