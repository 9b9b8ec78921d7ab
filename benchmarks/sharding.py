"""Compares a sharded training with one whose processes hold the whole model: memory, seconds and bytes on this machine.

    python -m benchmarks.sharding [--processes 2] [--turns 3] [--rounds 2] [--tiny]

Both do the same updates on the same stored completions; the sides take turns (A B B A), each time in new processes.
Prints medians over all processes and turns, and the ratio of sharded to whole.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.cases import tiny
from benchmarks.command import parse
from benchmarks.side_ours import run_directory
from benchmarks.vs_trl import ROOT, busy_share, environment, hardware
from benchmarks.workload import Workload, write
from tests.serving import free_ports

MIB = 2**20
SIDES = {"sharded": "full", "whole": "none"}  # train.sharding
MEASURED = Workload(
    hidden=512,
    intermediate=2048,
    layers=12,
    heads=8,
    kv_heads=8,
    prompts=8,
    prompt_lengths=(8, 32),
    group=4,
    completion=32,
)


def figures(folder: Path, run: Path, processes: int, turns: int, tokens: int | None = None) -> list[dict[str, Any]]:
    """Measure each process of a training, see `side_sharding.measured`. Raises RuntimeError with the process's output
    if one fails."""
    results = run / "measured"
    results.mkdir()
    # Each allocation gets pages of its own, and returns them when it is freed.
    shared = {"MALLOC_MMAP_THRESHOLD_": 2**16, "OMP_NUM_THREADS": max(1, (os.cpu_count() or 1) // processes)}
    if processes > 1:
        [port] = free_ports(1)
        shared |= {"WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes, "MASTER_PORT": port}
    command = [sys.executable, "-m", "benchmarks.side_sharding", str(folder), str(run), str(results), str(turns)]
    command += [] if tokens is None else [str(tokens)]
    started = []
    for rank in range(processes):
        numbers = shared | ({"RANK": rank, "LOCAL_RANK": rank} if processes > 1 else {})
        variables = environment() | {name: str(value) for name, value in numbers.items()}
        variables |= {"MASTER_ADDR": "127.0.0.1", "ACCELERATE_USE_CPU": "true"}
        with (results / f"{rank}.log").open("w") as log:
            started.append(subprocess.Popen(command, cwd=ROOT, env=variables, stdout=log, stderr=log))
    try:
        while None in (ended := [process.poll() for process in started]) and not any(ended):
            time.sleep(0.05)
    finally:
        for process in started:
            process.kill()
    if any(ended):
        raise RuntimeError("\n".join((results / f"{rank}.log").read_text()[-4000:] for rank in range(processes)))
    return [json.loads((results / f"{rank}.json").read_text()) for rank in range(processes)]


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.sharding", description="What sharding costs on this machine.")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--turns", type=int, default=3, help="updates per round and side that count")
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parse(parser)
    workload = tiny(MEASURED) if arguments.tiny else MEASURED
    print(f"{arguments.processes} processes on {hardware()}; others take {busy_share():.0%} of the processors' time")
    found: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "workload")
        write(workload, folder)
        for number in range(arguments.rounds):
            for side in SIDES if number % 2 == 0 else reversed(SIDES):
                run = Path(scratch, f"{side}-{number}")
                settings = {"precision": "no", "processes": arguments.processes, "sharding": SIDES[side]}
                run_directory(workload, folder, run, settings)
                found[side] += figures(folder, run, arguments.processes, arguments.turns)
    parameters = found["whole"][0]["parameters"]
    print(f"{parameters / 1e6:.0f} million parameters, {workload.completions} completions per update, float32")
    report(found)


def report(found: dict[str, list[dict[str, Any]]]) -> None:
    rows: dict[str, Any] = {
        "s per update": lambda it: median(it["updates"]),
        "s per scoring of all completions": lambda it: median(it["scorings"]),
        "MiB gathered per update": lambda it: it["sent"].get("gathered", 0) / MIB,
        "MiB reduced per update": lambda it: it["sent"].get("reduced", 0) / MIB,
        "MiB at most while loading": lambda it: it["loading"] / MIB,
        "MiB between updates": lambda it: it["held"] / MIB,
        "MiB at the peak of an update": lambda it: it["peak"] / MIB,
    }
    print(f"{'per process, median':34} {'sharded':>10} {'whole':>10} {'ratio':>7}")
    for name, figure in rows.items():
        sharded, whole = (median(figure(it) for it in found[side]) for side in ("sharded", "whole"))
        ratio = f"{sharded / whole:6.2f}×" if whole else ""
        print(f"{name:34} {sharded:10.2f} {whole:10.2f} {ratio:>7}")


if __name__ == "__main__":
    main()
