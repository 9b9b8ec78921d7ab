"""Measures what sending figures to MLflow costs a training: CPU time, as a share of this machine.

    python -m benchmarks.tracking [--tiny]

The training process only writes metrics.jsonl. It can lose to tracking only the CPU time of the sender and of a server
on the same machine. This CPU time is measured while rows arrive at a training's pace, so that other work on the machine
does not blur it; first with MLflow's SQLite file, then with a server on this machine.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import mlflow
import psutil

from benchmarks.command import parse
from tasks.tracking.sending import sending
from tests.serving import free_ports, mlflow_server

FIGURES = 30  # per update, as many as in the quickstart
STARTING = 10.0  # seconds, not counted, in which the sender connects, once per training


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.tracking", description="CPU time that tracking takes.")
    parser.add_argument("--update", type=float, default=0.25, help="seconds an update; the quickstart's on two cores")
    parser.add_argument("--seconds", type=float, default=60.0, help="to measure each way for")
    arguments = parse(parser)
    if arguments.tiny:
        arguments.update, arguments.seconds = 0.05, 0.2
    logging.getLogger("mlflow").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        folder = Path(scratch)
        [port] = free_ports(1)
        server = stack.enter_context(mlflow_server(folder, port))
        uris = {"sqlite": f"sqlite:///{folder / 'file.db'}", "server": f"http://127.0.0.1:{port}"}
        print(f"MLflow   CPU ms an update of {arguments.update:g} s   share of {os.cpu_count()} cores")
        for way, uri in uris.items():
            (training := folder / way).mkdir()
            helpers = [psutil.Process(server.pid)] if way == "server" else []
            starting = arguments.update if arguments.tiny else STARTING
            taken = _cpu_seconds(training, uri, helpers, arguments.update, starting, arguments.seconds)
            share = taken / arguments.seconds
            print(f"{way:8} {1000 * share * arguments.update:27.1f} {share / (os.cpu_count() or 1):19.2%}", flush=True)


def _cpu_seconds(
    training: Path, uri: str, helpers: list[psutil.Process], update: float, starting: float, seconds: float
) -> float:
    """Measure the CPU time of this process, and of `helpers` with their children, while a training of `seconds` is
    tracked, after its first `starting` seconds."""
    os.environ["MLFLOW_TRACKING_URI"] = uri
    mlflow.set_tracking_uri(uri)
    info = mlflow.MlflowClient().create_run("0").info
    run = {"run_id": info.run_id, "start_time": info.start_time}
    with sending(training, run, logging.getLogger("sending")), (training / "metrics.jsonl").open("a") as metrics:
        _train(metrics, 0, update, starting)
        before = _used(helpers)
        _train(metrics, round(starting / update), update, seconds)
        return _used(helpers) - before


def _train(metrics: Any, done: int, update: float, seconds: float) -> None:
    for step in range(done + 1, done + round(seconds / update) + 1):
        time.sleep(update)
        figures = {f"figure/{number}": random.random() for number in range(FIGURES)}
        metrics.write(json.dumps({"step": step, "timestamp": time.time(), **figures}) + "\n")
        metrics.flush()


def _used(helpers: list[psutil.Process]) -> float:
    processes = [psutil.Process(), *helpers, *(child for it in helpers for child in it.children(recursive=True))]
    return sum(sum(process.cpu_times()[:2]) for process in processes)


if __name__ == "__main__":
    main()
