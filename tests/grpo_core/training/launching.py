"""Trainings as processes of their own, which can be held at a point, killed and waited for."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from benchmarks import command


def processes(count: int) -> list[str]:
    """The launcher of that many processes; of one, none."""
    if count == 1:
        return []
    launch = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", str(count)]
    return [*launch, "--main_process_port", "0"]


TWO_PROCESSES = processes(2)

# Blocks for good at the scoring that $STUCK_AT numbers.
REWARD = """
import os, threading
calls = []
def patient(completion_ids):
    calls.append(1)
    if len(calls) == int(os.environ["STUCK_AT"]):
        print("stuck", flush=True)
        threading.Event().wait()
    return [-float(len(ids)) for ids in completion_ids]
"""


def kill_tree(pid: int) -> None:
    with suppress(psutil.NoSuchProcess):
        launcher = psutil.Process(pid)
        for process in [*launcher.children(recursive=True), launcher]:
            with suppress(psutil.NoSuchProcess):
                process.kill()


@contextmanager
def started(run: Path, python_path: Path, stuck_at: int, *launcher: str) -> Iterator[subprocess.Popen[str]]:
    """A training of which nothing is left afterwards, its workers included."""
    path = command.python_path(python_path, command.ROOT)
    process = subprocess.Popen(
        [sys.executable, *launcher, "-m", "grpo_core.train", str(run)],
        env={**os.environ, "PYTHONPATH": path, "STUCK_AT": str(stuck_at), "ACCELERATE_USE_CPU": "true"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    watchdog = threading.Timer(600, kill_tree, (process.pid,))
    watchdog.start()
    try:
        yield process
    finally:
        watchdog.cancel()
        if process.poll() is None:
            kill_tree(process.pid)
        process.wait()


def finish(process: subprocess.Popen[str]) -> str:
    """Wait for the end of a training that succeeds; what it has said."""
    output, _ = process.communicate()
    assert process.returncode == 0, output
    return output
