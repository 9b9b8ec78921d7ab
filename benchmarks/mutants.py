"""How many faults planted in a room's code the room's own tests notice: `make mutants ROOM=grpo_core/planning`.

A mutant is one place of the code changed by an operator of Cosmic Ray. Places are drawn by a seed, one operator for
each. Each mutant runs against the tests of its room alone, fast ones first, until one fails. A live mutant is a
behaviour that no test of its room holds, or it is equivalent: only reading it tells. Two run side by side, each in a
copy of the project.
"""

from __future__ import annotations

import argparse
import os
import random
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from multiprocessing import current_process
from pathlib import Path

from cosmic_ray.commands import init
from cosmic_ray.mutating import mutate_and_test
from cosmic_ray.testing import run_tests
from cosmic_ray.work_db import use_db
from cosmic_ray.work_item import MutationSpec, TestOutcome

from benchmarks.command import ROOT

TIMED_OUT = "timed out"  # not counted as noticed
# Of `X | None` in an annotation, which nothing evaluates, they make equivalent mutants.
LEFT_OUT = "core/ReplaceBinaryOperator_BitOr"


def draw(room: str, count: int, seed: int) -> list[MutationSpec]:
    """Draw mutants at `count` different places of a room, or at all if there are fewer."""
    files = sorted(path.relative_to(ROOT) for path in (ROOT / room).glob("*.py"))
    with tempfile.TemporaryDirectory() as folder, use_db(f"{folder}/session") as session:
        init(files, session, {})
        found = [item.mutations[0] for item in session.work_items]
    places: dict[tuple[str, tuple[int, int]], list[MutationSpec]] = {}
    for mutant in sorted(found, key=lambda it: (str(it.module_path), it.start_pos, it.operator_name)):
        if not mutant.operator_name.startswith(LEFT_OUT):
            places.setdefault((str(mutant.module_path), mutant.start_pos), []).append(mutant)
    drawn = random.Random(seed)
    return [drawn.choice(places[place]) for place in drawn.sample(sorted(places), min(count, len(places)))]


def enter_copy(folder: str) -> None:
    """Make a copy of the project for this process alone, and work in it."""
    copy = Path(folder, current_process().name)
    ignored = shutil.ignore_patterns(".git", ".venv*", ".*_cache", "storage", "mlruns", "__pycache__")
    shutil.copytree(ROOT, copy, ignore=ignored, symlinks=True)
    os.chdir(copy)
    os.environ["PYTHONPATH"] = str(copy)


def command(tests: str) -> str:
    """The command that runs a room's tests until one fails."""
    python = f"{ROOT / '.venv/bin/python'} -m pytest -x -q -p no:cacheprovider"
    parts = [f"{python} -m '{mark} and not e2e' {tests}" for mark in ("not slow", "slow")]
    # Status 5: no test has such a mark.
    script = "\n".join(f"{part}; case $? in 0|5) ;; *) exit 1 ;; esac" for part in parts)
    return f"bash -c {shlex.quote(script)}"


def run(mutant: MutationSpec, tests: str, limit: float) -> list[str]:
    """Return a row: what became of the mutant, the seconds that took, its place, and the changed line."""
    start = time.monotonic()
    result = mutate_and_test([mutant], command(tests), limit)
    lines = [line for line in (result.diff or "").splitlines() if line.startswith("+") and not line.startswith("+++")]
    became = TIMED_OUT if result.output == "timeout" else str(result.test_outcome.value)
    changed = lines[0][1:].strip().replace("|", "\\|") if lines else mutant.operator_name
    return [became, f"{time.monotonic() - start:.0f}", f"{mutant.module_path}:{mutant.start_pos[0]}", f"`{changed}`"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("room", help="folder with the room's modules, such as grpo_core/planning")
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=240.0, help="seconds for each mutant")
    arguments = parser.parse_args()
    tests = f"tests/{arguments.room}"
    if not (ROOT / arguments.room).is_dir() or not (ROOT / tests).is_dir():
        parser.error(f"{arguments.room!r}: a room is a folder of modules with tests in {tests}")
    revision = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    print(f"{arguments.room} at {revision.strip()}, seed {arguments.seed}\n")
    print("| became | seconds | place | line |\n|---|---|---|---|", flush=True)
    became = []
    mutants = draw(arguments.room, arguments.count, arguments.seed)
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(2, initializer=enter_copy, initargs=(folder,)) as pool,
    ):
        outcome, said = pool.submit(run_tests, command(tests), None).result()
        if outcome is not TestOutcome.SURVIVED:
            sys.exit(f"without a mutant, the tests of {arguments.room} fail:\n{said}")
        for row in pool.map(run, mutants, repeat(tests), repeat(arguments.limit)):
            became.append(row[0])
            print(f"| {' | '.join(row)} |", flush=True)
    print(f"\n{became.count('killed')} of {len(became)} noticed, {became.count(TIMED_OUT)} {TIMED_OUT}")


if __name__ == "__main__":
    main()
