"""Measures the distance of vLLM's log-probabilities from the trainer's after each update, in float32.

    python -m benchmarks.engine_gap [--tiny]

Trains the comparison's 5.8M model for a few updates with vLLM sampling. After each update both sides score the same
probe (mean difference); and every token that vLLM samples is scored again in training (largest difference).
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path

from benchmarks.cases import GENERATE, tiny
from benchmarks.command import parse
from benchmarks.vs_trl import run
from benchmarks.workload import write

BOUND = 1e-5


def main() -> None:
    options = parse(argparse.ArgumentParser(description=str(__doc__).partition("\n")[0]))
    workload = replace(GENERATE, completion=64, steps=6)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "workload")
        write(tiny(workload) if options.tiny else workload, folder)
        metrics = run("ours", {"precision": "no", "engine": "vllm"}, folder)["metrics"]
    print("update  probe, mean  sampled tokens, mean  largest")
    for step, values in enumerate(metrics, start=1):
        probe = values["sampling/sync_drift"]
        mean, largest = (values[f"sampling/sampling_logp_difference/{name}"] for name in ("mean", "max"))
        print(f"{step:6}  {probe:11.1e}  {mean:20.1e}  {largest:7.1e}")
    worst = max(values["sampling/sampling_logp_difference/max"] for values in metrics)
    print(f"largest of all: {worst:.1e}, bound {BOUND:g}")
    if worst > BOUND:
        raise SystemExit("the engine is further from the trainer than it may be")


if __name__ == "__main__":
    main()
