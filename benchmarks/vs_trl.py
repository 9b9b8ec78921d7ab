"""Compares our loop with TRL's on this machine: `make bench`.

    python -m benchmarks.vs_trl [--gpu] [--only CASE ...] [--output FOLDER] [--tiny]

Each run is a process of its own with the same model folder, prompts, rewards, optimizer, precision and threads; the
sides take turns (A B C C B A), warm-up steps are dropped, medians are compared. TRL runs with its defaults, and tuned:
without recomputing activations, with the micro-batch and the precision that are fastest here. Nothing is measured on a
busy machine. The record is a JSON file and a picture, named after the hardware. A case that is more than 10 % slower
than its record fails, and leaves the record as it is: what was measured is then written beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.cases import CASES, GATED, GPU, Case, cut_down, seconds
from benchmarks.command import ROOT, parse, python_path
from benchmarks.record import Verdict, beside, judge, read_record, record_path, save
from benchmarks.workload import Workload, training_flops, write

PACKAGES = ("torch", "transformers", "trl", "accelerate")
BUSY = 0.08  # share of the processors' time that others may take
PATIENCE = 60.0  # seconds to wait for a quiet machine
TUNING: dict[str, Any] = {"mode": "replay", "silent": 0.0, "steps": 2, "warm_up": 1}
FIRST_TRIED = {"rows": 16, "checkpointing": False, "precision": "bf16"}  # TRL's settings at the start of tuning
PRODUCT = 8192 if torch.cuda.is_available() else 1024  # size of the matrices by which the machine's rate is measured
TINY_PRODUCT = 64
# Size by which bf16 is tried: a processor without instructions for it multiplies sixty times slower than in float32.
TRIED_PRODUCT = PRODUCT if torch.cuda.is_available() else 256
INSTRUCTIONS = ("amx_bf16", "avx512_bf16", "avx512f", "avx2")  # as Linux names them, the fastest first
DRIFT = 0.15  # between the calibrations before and after a case; from this on, its figures are marked

Settings = dict[str, Any]


class OutOfMemoryError(RuntimeError):
    """Raised if a side's settings do not fit into this device's memory."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare the training loop with TRL's, side by side.")
    parser.add_argument("--gpu", action="store_true", help="the cases for a GPU")
    names = [case.name for case in CASES]
    parser.add_argument("--only", nargs="+", choices=names, metavar="CASE", help=f"of {', '.join(names)}")
    arguments = parse(parser, writes=True)
    if arguments.gpu and not arguments.tiny and not torch.cuda.is_available():
        parser.error("--gpu: no GPU here; with --tiny its cases run on the CPU, to see that they run")
    chosen = GPU if arguments.gpu else GATED
    if arguments.only is not None:
        chosen = [case for case in CASES if case.name in arguments.only]
    if arguments.tiny:
        chosen = [cut_down(case) for case in chosen]
    path = record_path(arguments.output, hardware())
    record, measured = read_record(path), list[tuple[dict[str, Any], Verdict]]()
    tunings: dict[Workload, tuple[Settings, list[dict[str, Any]]]] = {}  # cases with the same workload are tuned once
    for case in chosen:
        workload = tuning_workload(case.workload)
        if not arguments.tiny:
            wait_until_quiet()
        if workload not in tunings:
            tunings[workload] = tune(workload)
        result = compare(case, *tunings[workload], TINY_PRODUCT if arguments.tiny else PRODUCT)
        measured.append((result, judge(result, record.get(case.name))))
        report(*measured[-1])
        save(measured, record, path, hardware())
    print(f"\n{path}")
    if arguments.tiny:
        print("all sizes are cut down, so that the figures say nothing")
        return
    failed = [f"{result['case']} misses a gate" for result, _ in measured if not result["met"]]
    if slower := {result["case"]: verdict.said for result, verdict in measured if verdict.is_slower}:
        failed += [f"{name} is slower: {said}" for name, said in slower.items()]
        failed.append(
            f"Measure again (--only {' '.join(slower)}). The record is as it was; {beside(path)} has these figures, "
            "to take its place if they are meant"
        )
    if failed:
        raise SystemExit("\n".join(failed))


def compare(case: Case, tuned: Settings, tried: list[dict[str, Any]], product: int) -> dict[str, Any]:
    """Measure one case: all sides take turns. `product`: size of the matrices that are multiplied beside it."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write(case.workload, folder / "measured")
        precision = tuned["precision"]
        sides: dict[str, tuple[str, Settings]] = {
            "ours": ("ours", {"precision": precision, "engine": case.engine}),
            "TRL tuned": ("trl", tuned | {"engine": case.engine}),
            "TRL default": (
                "trl",
                {"precision": precision, "rows": 8, "checkpointing": True, "engine": case.engine},
            ),
        }
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
        before = calibrate(precision, product)
        for turn in range(case.turns):
            for name in sides if turn % 2 == 0 else reversed(sides):
                side, settings = sides[name]
                runs[name].append(run(side, settings | {"seed": turn}, folder / "measured"))
        after = calibrate(precision, product)
    return summary(case, sides, runs, tried, (before, after))


def tuning_workload(workload: Workload) -> Workload:
    """Workload for tuning: the training phase alone, if there are completions to replay."""
    if workload.task == "sums":
        return replace(workload, steps=6, warm_up=2)
    return replace(workload, **TUNING)


def tune(workload: Workload) -> tuple[Settings, list[dict[str, Any]]]:
    """Find TRL's fastest settings for the workload; returns them and all that were tried: precision first, then the
    micro-batch."""
    tried: list[tuple[float, Settings]] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "tuning")
        write(workload, folder)

        def attempt(settings: Settings) -> None:
            try:
                found = seconds(run("trl", settings, folder))
            except OutOfMemoryError:
                found = float("inf")
            tried.append((found, settings))
            print(f"  tuning TRL: {settings}: {found:.3f} s", flush=True)

        def fastest() -> Settings:
            return min(tried, key=lambda entry: entry[0])[1]

        attempt({**FIRST_TRIED, "precision": "no"})
        if multiplies_faster_in_bf16():  # else minutes, for no gain
            attempt(FIRST_TRIED)
        precision = fastest()["precision"]
        for rows in (8, 32, 64, 128, 256, 512):
            if rows <= workload.completions:
                attempt({**FIRST_TRIED, "precision": precision, "rows": rows})
    return fastest(), [{**settings, "seconds": found} for found, settings in tried]


def run(side: str, settings: Settings, folder: Path) -> dict[str, Any]:
    """Run one training in a process of its own."""
    result = folder / "result.json"
    command = [sys.executable, "-m", f"benchmarks.side_{side}", str(folder), json.dumps(settings), str(result)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    if "torch.OutOfMemoryError" in done.stderr:
        raise OutOfMemoryError
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return json.loads(result.read_text())


def environment() -> dict[str, str]:
    """Environment variables, the same for every side."""
    quiet = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "TOKENIZERS_PARALLELISM": "false"}
    return {**os.environ, **quiet, "OMP_NUM_THREADS": str(os.cpu_count()), "PYTHONPATH": python_path(ROOT)}


def summary(
    case: Case,
    sides: dict[str, tuple[str, Settings]],
    runs: dict[str, list[dict[str, Any]]],
    tried: list[dict[str, Any]],
    calibration: tuple[float, float],
) -> dict[str, Any]:
    """Medians over all counted steps, as JSON has them; the spread is that of the single runs' medians."""
    figures: dict[str, dict[str, Any]] = {
        name: {
            "settings": settings,
            "seconds": [found["seconds"] for found in runs[name]],
            "value": median(case.measure(found) for found in runs[name]),
            "lowest": min(case.measure(found) for found in runs[name]),
            "highest": max(case.measure(found) for found in runs[name]),
        }
        for name, (_, settings) in sides.items()
    }
    ours = figures["ours"]["value"]
    ratios = {name: figures[name]["value"] / ours for name in ("TRL default", "TRL tuned")}
    result = {
        "case": case.name,
        "date": time.strftime("%Y-%m-%d"),
        "packages": {package: version(package) for package in PACKAGES},
        "about": case.about,
        "unit": case.unit,
        "workload": asdict(case.workload),
        "sides": figures,
        "tried": tried,
        "ratios": ratios,
        "utilisation": utilisation(case, figures["ours"]["value"], calibration),
        "token_step_ms": token_step_ms(case, runs["ours"]),
        "gates": case.gates,
        "goals": case.goals,
        "met": all(ratios[name] >= gate for name, gate in case.gates.items()),
        "calibration_gflops": calibration,
        "steady": abs(calibration[0] / calibration[1] - 1) <= DRIFT,
    }
    # As the record will be read again, tuples as lists: else no workload equals that of the record.
    return json.loads(json.dumps(result))


def utilisation(case: Case, seconds_a_step: float, gflops: tuple[float, float]) -> float | None:
    """Operations that a step needs, as a share of those that a matrix product does in our time; only for training
    phases."""
    if case.workload.mode != "replay" or case.measure is not seconds:
        return None
    return training_flops(case.workload) / seconds_a_step / (median(gflops) * 1e9)


def token_step_ms(case: Case, runs: list[dict[str, Any]]) -> float | None:
    """Median milliseconds in which our engine samples one token for all completions of a step, prompts included."""
    if case.workload.mode != "generate":
        return None
    steps = [step for found in runs for step in found["metrics"][case.workload.warm_up :]]
    return median(1e3 * step["time/generate"] / step["completions/max_length"] for step in steps)


def report(result: dict[str, Any], verdict: Verdict) -> None:
    print(f"{result['case']}: {result['about']}{'' if result['steady'] else ' (the machine was not steady)'}")
    for name, side in result["sides"].items():
        ratio = f"  {result['ratios'][name]:5.2f}×" if name in result["ratios"] else ""
        gate = ""
        if name in result["gates"]:
            gate = f" (gate {result['gates'][name]:g}×, goal {result['goals'][name]:g}×)"
        spread = f"{side['value']:9.3f} {result['unit']} [{side['lowest']:.3f}, {side['highest']:.3f}]"
        print(f"  {name:12} {spread}{ratio}{gate}", flush=True)
    if result["utilisation"] is not None:
        print(f"  ours at {result['utilisation']:.0%} of what a matrix product does here", flush=True)
    if result["token_step_ms"] is not None:
        print(f"  our engine takes {result['token_step_ms']:.2f} ms a token step", flush=True)
    print(f"  ours beside the record: {verdict.said}{', SLOWER' * verdict.is_slower}", flush=True)


def hardware() -> str:
    """Name of the GPU, or of the processor with its number of cores and the fastest instructions that it has."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    lines = [line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines()]
    told = {name.strip(): value.strip() for name, _, value in reversed(lines)}  # the first processor's
    # Machines that a cloud lends under one name differ in these, and so in which precision is fast.
    found = next((flag for flag in INSTRUCTIONS if flag in told.get("flags", "").split()), "")
    name = f"{os.cpu_count()} cores of {told.get('model name', 'processor').replace('(R)', '')}"
    return f"{name} with {found.upper().replace('_', '-')}" if found else name


def wait_until_quiet() -> None:
    """Wait until other processes leave the processors alone; exit if they do not."""
    deadline = time.monotonic() + PATIENCE
    while (share := busy_share()) > BUSY:
        if time.monotonic() > deadline:
            raise SystemExit(
                f"other processes take {share:.0%} of the processors' time, a measurement allows {BUSY:.0%}: "
                "end them, and measure again"
            )


def busy_share(seconds: float = 2.0) -> float:
    """Share of all processors' time that was used while this process slept."""

    def times() -> tuple[int, int]:
        fields = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
        return sum(fields), fields[3] + fields[4]

    total, idle = times()
    time.sleep(seconds)
    total_after, idle_after = times()
    return 1 - (idle_after - idle) / max(total_after - total, 1)


def multiplies_faster_in_bf16() -> bool:
    return calibrate("bf16", TRIED_PRODUCT) > calibrate("no", TRIED_PRODUCT)


def calibrate(precision: str, size: int) -> float:
    """Measure GFLOP/s of a matrix product, to distinguish a slow machine from a slow program."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    a = torch.randn(size, size, device=device, dtype=torch.bfloat16 if precision == "bf16" else torch.float32)
    rates = []
    for _ in range(15):
        start = time.perf_counter()
        for _ in range(4):
            product = a @ a
        product[0, 0].item()  # waits until a GPU is done too
        rates.append(4 * 2 * size**3 / (time.perf_counter() - start) / 1e9)
    return median(rates)


if __name__ == "__main__":
    main()
