"""Checks whether this machine's GPU runs everything correctly, and how fast: `make gpu-check`.

    python -m benchmarks.gpu_check [--offline] [--budget SECONDS] [--only PART ...] [--skip PART ...]
                                   [--output gpu-check.json] [--tiny]

Needs no network and no installation: parts whose packages are missing are listed as not run. Each part runs in a
process of its own with a time limit of its own, so that a crash or hang ends only that part. Parts that tell right from
wrong run side by side; parts that measure run alone, after them; the most telling come first, and what no time is left
for is listed as not started. Prints a table and writes it to a file after each part, with versions, hardware and the
output of failed parts: send that file back. Without a GPU, or with --tiny, all sizes only show that the parts run.
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
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil

from benchmarks.command import ROOT, parse
from benchmarks.vs_trl import environment

TAIL = 6000  # characters kept of a failed part's output
POLL_SECONDS = 0.1
ON_GPU = Path("/dev/nvidiactl").exists()
SLOWER = 5  # times the limits without a GPU, on few cores
CACHE_BYTES = 4 * 10**9  # of an engine of vLLM's beside others


@dataclass(frozen=True)
class Part:
    """A part: `work` is a function of benchmarks.gpu, MODULE:FUNCTION. It is ended after `limit` seconds, and not
    started with less than `least` left of the budget. `needs`: modules beyond those of a bare training."""

    name: str
    work: str
    limit: float
    least: float = 20
    needs: tuple[str, ...] = ()


SIDE_BY_SIDE = [
    Part("attention", "kernels:attention", 90),
    Part("head", "kernels:head", 90),
    Part("copies", "kernels:copies", 60),
    Part("policies", "kernels:policies", 180),
    Part("waits", "kernels:waits", 120),
    Part("decoding", "decoding:decoding", 120),
    Part("fall-backs", "decoding:fall_backs", 120),
    Part("stop-texts", "decoding:stop_texts", 90),
    Part("resume", "trainings:resume", 240, 60),
    Part("deterministic", "trainings:deterministic", 240, 60),
    Part("adapters", "trainings:adapters", 150, 40, ("peft",)),
    Part("8-bits", "trainings:eight_bits", 150, 40),
    Part("hybrid", "trainings:hybrid", 240, 60, ("fla", "causal_conv1d")),
    Part("vllm-gap", "engines:gap", 180, 50, ("vllm",)),
    Part("vllm-resume", "engines:colocated", 240, 80, ("vllm",)),
    Part("vllm-adapter", "engines:adapter", 180, 60, ("vllm", "peft")),
    Part("vllm-server", "engines:server", 300, 90, ("vllm",)),
]
ALONE = [
    Part("update-0.5B", "measured:update_half", 100, 30),
    Part("update-0.5B-plain", "measured:plain_layers", 100, 30),
    Part("steps-0.5B", "measured:end_to_end", 100, 30),
    Part("out-of-memory", "measured:out_of_memory", 90, 30),
    Part("peer-update", "measured:peer_update", 150, 40, ("trl", "liger_kernel")),
    Part("long-context", "measured:long_context", 100, 30),
    Part("update-3B", "measured:update_3b", 120, 45),
    Part("vllm-steps-0.5B", "engines:speed", 150, 60, ("vllm",)),
    Part("vllm-memory", "engines:too_little_memory", 150, 60, ("vllm",)),
    Part("update-1.5B", "measured:update_large", 110, 40),
    Part("offloaded", "measured:offloaded", 90, 30),
    Part("compiled", "measured:compiled", 120, 40),
    Part("token-steps", "decoding:token_steps", 90, 25),
    Part("peer-steps", "measured:peer_end_to_end", 150, 60, ("trl",)),
    Part("processes", "trainings:processes", 480, 60),
]
WHOLE = [Part("pipeline", "engines:pipeline", 900, 60, ("prefect", "mlflow", "pandera", "vllm"))]  # not with --offline
GROUPS = [[Part("hardware", "hardware:hardware", 90, 10)], SIDE_BY_SIDE, *([part] for part in ALONE + WHOLE)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--offline", action="store_true", help="without the whole pipeline: what bare PyTorch runs")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds for all parts together")
    names = [part.name for group in GROUPS for part in group]
    listed = f"of {', '.join(names)}"
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="PART", help=listed)
    parser.add_argument("--skip", nargs="+", choices=names, default=[], metavar="PART")
    parser.add_argument("--output", type=Path, default=Path("gpu-check.json"))
    arguments = parse(parser)
    if arguments.tiny:
        os.environ["GPU_CHECK_TINY"] = "1"
    start, results = time.monotonic(), []
    left_out = {*arguments.skip, *(part.name for part in WHOLE if arguments.offline)}
    chosen = [[part for part in group if part.name in arguments.only and part.name not in left_out] for group in GROUPS]
    for result in run_groups(chosen, start + arguments.budget):
        print(table(result), flush=True)
        results.append(result)
        write(results, arguments.output)
    failed = [result["part"] for result in results if result["passed"] is False]
    print(f"\n{time.monotonic() - start:.0f} s; the table, versions and failures are in {arguments.output}")
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}. Please send {arguments.output} back")


def run_groups(groups: Sequence[Sequence[Part]], deadline: float) -> Iterator[dict[str, Any]]:
    """Run the parts of each group side by side, and yield the result of each when it ends."""
    for group in groups if ON_GPU else [[part] for several in groups for part in several]:
        running: list[_Running] = []
        for part in group:
            missing = [module for module in part.needs if find_spec(module) is None]
            left = deadline - time.monotonic()
            if missing or left < part.least:
                why = f"needs {', '.join(missing)}" if missing else f"not started: {max(left, 0):.0f} s left"
                yield {"part": part.name, "passed": None, "seconds": 0, "rows": [], "output": why}
            else:
                running.append(_Running(part, deadline))
        while running:
            for found in [found for found in running if found.has_ended()]:
                running.remove(found)
                yield found.result()
            time.sleep(POLL_SECONDS)


class _Running:
    """A part's process, with its rows and its output in files."""

    def __init__(self, part: Part, deadline: float):
        self.part, self.begun = part, time.monotonic()
        self.deadline = min(self.begun + part.limit * (1 if ON_GPU else SLOWER), deadline)
        self.scratch = tempfile.TemporaryDirectory(prefix="gpu-check-")
        folder = Path(self.scratch.name)
        self.rows, self.output = folder / "rows.jsonl", folder / "output"
        own = {"GPU_CHECK_PROFILES": str(folder)}
        if part in SIDE_BY_SIDE:
            if ON_GPU:  # several engines share it
                options = json.loads(os.environ.get("GPU_CHECK_VLLM") or "{}")
                own["GPU_CHECK_VLLM"] = json.dumps(options | {"kv_cache_memory_bytes": CACHE_BYTES})
        else:  # these train in their own process; as the launcher sets it
            own["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
        with self.output.open("w") as said:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.gpu.part", part.work, str(folder / "work"), str(self.rows)],
                cwd=ROOT,
                env=environment() | own,
                stdout=said,
                stderr=said,
            )

    def has_ended(self) -> bool:
        if self.process.poll() is None and time.monotonic() > self.deadline:
            part = psutil.Process(self.process.pid)
            for process in [part, *part.children(recursive=True)]:  # trainings and servers have sessions of their own
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            self.process.wait()
            with self.output.open("a") as said:
                said.write(f"\nstopped after {time.monotonic() - self.begun:.0f} s\n")
        return self.process.poll() is not None

    def result(self) -> dict[str, Any]:
        lines = self.rows.read_text().splitlines() if self.rows.exists() else []
        rows = [json.loads(line) for line in lines]
        passed = self.process.returncode == 0 and all(row["passed"] is not False for row in rows)
        said = self.output.read_text(errors="replace")
        profile = Path(self.scratch.name) / "profile.txt"
        seconds = round(time.monotonic() - self.begun, 1)
        found = {"part": self.part.name, "passed": passed, "seconds": seconds, "rows": rows}
        found |= {"output": "" if passed else said[-TAIL:]}
        found |= {"profile": profile.read_text()} if profile.exists() else {}
        self.scratch.cleanup()
        return found


def table(result: dict[str, Any]) -> str:
    """Format the rows of one part in columns: ok, FAILED, or - if nothing is demanded."""
    rows: Sequence[dict[str, Any]] = result["rows"]
    mark = {True: "ok", False: "FAILED", None: "-"}
    lines = [f"{result['part']}: {mark[result['passed']]}, {result['seconds']} s"]
    lines += [f"  {row['what']:60} {row['found']:>24}  {row['demanded']:24} {mark[row['passed']]}" for row in rows]
    if result["passed"] is None:
        lines.append(f"  {result['output']}")
    elif result["output"]:
        lines += ["  the part failed; its output ends with:", *result["output"].splitlines()[-12:]]
    return "\n".join(lines)


def write(results: list[dict[str, Any]], path: Path) -> None:
    """Write what is known so far, so that a run that is cut short leaves its results."""
    command = ["git", "rev-parse", "HEAD"]
    try:
        commit = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    except FileNotFoundError:
        commit = ""
    document = {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit or "unknown",
        "system": platform.platform(),
        "parts": results,
    }
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(document, indent=1) + "\n")
    temporary.rename(path)


if __name__ == "__main__":
    main()
