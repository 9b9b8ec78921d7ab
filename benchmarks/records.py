"""Measures what rollouts, figures and traces cost a training: seconds of the trainer, CPU time of the flow's process.

    python -m benchmarks.records [--seconds 60] [--tiny]

A real training writes its files, while another process follows them as a flow's does, and sends figures and traces to
MLflow's SQLite file. The trainer's part is timed within the steps with which it is compared, so that other work on the
machine slows both; CPU time excludes waiting for the disk and for other work. Writes benchmarks/results/records.json.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import psutil

from benchmarks.cases import TINY, tiny
from benchmarks.command import parse
from benchmarks.side_ours import run_directory
from benchmarks.vs_trl import hardware
from benchmarks.workload import Workload, write

CASES = {"tiny, 0.8M": TINY}
PRECISION = {"precision": "no"}
WARM_UP = 3  # steps that are not counted
FEWEST = 12  # counted steps


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.records", description="What records cost a training.")
    parser.add_argument("--seconds", type=float, default=60.0, help="that each training takes, about")
    parser.add_argument("--follow", type=Path, help=argparse.SUPPRESS)
    arguments = parse(parser, writes=True)
    if arguments.follow:
        follow(arguments.follow)
        return
    cases, load = [], os.getloadavg()[0]
    for name, workload in CASES.items():
        workload = tiny(workload) if arguments.tiny else workload
        found = measure(workload, 0.0 if arguments.tiny else arguments.seconds)
        cases.append({"case": name, "workload": asdict(workload), **found})
        print(
            f"{name}: a step takes {1e3 * found['step_seconds']:.0f} ms, of which the trainer writes for "
            f"{1e3 * found['writing_seconds']:.2f} ms ({found['writing_share']:.2%}), in CPU time "
            f"{1e3 * found['writing_cpu_seconds']:.2f} of {1e3 * found['step_cpu_seconds']:.0f} ms; the flow's process "
            f"takes {1e3 * found['flow_cpu_seconds']:.1f} ms of CPU per step ({found['flow_share']:.2%} of one core), "
            f"of which traces {1e3 * found['traces_cpu_seconds']:.2f} ms ({found['traces_share']:.2%} of one core)"
        )
    about = {"date": f"{datetime.now(UTC):%Y-%m-%d}", "hardware": hardware(), "load_before": load}
    (arguments.output / "records.json").write_text(json.dumps({**about, "cases": cases}, indent=1) + "\n")


def measure(workload: Workload, seconds: float) -> dict[str, float]:
    """Measure medians over the counted steps of a training of about `seconds` seconds."""
    from grpo_core.training.log import TrainingLog
    from grpo_core.training.loop import train

    steps: list[float] = []  # time at which each ended
    writing, computing = [0.0], [0.0]  # seconds and CPU seconds of writing, per step; the last step is still running
    used: list[float] = []  # CPU seconds of this process, when each step ended
    follower: subprocess.Popen[bytes] | None = None
    cpu: list[float] = []  # of the follower, when each step ended

    def timed(write: Callable[..., None], ends: bool) -> Callable[..., None]:
        def call(self: Any, *values: Any) -> None:
            start, begun = time.perf_counter(), time.process_time()
            write(self, *values)
            now, ended = time.perf_counter(), time.process_time()
            writing[-1] += now - start
            computing[-1] += ended - begun
            if ends:
                steps.append(now)
                used.append(ended)
                writing.append(0.0)
                computing.append(0.0)
                cpu.append(sum(psutil.Process(follower.pid).cpu_times()[:2]) if follower else 0.0)

        return call

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write(workload, folder / "workload")
        pace = _pace(workload, folder)
        (run := folder / "run").mkdir()
        long = replace(workload, steps=WARM_UP + max(FEWEST, round(seconds / pace)))
        run_directory(long, folder / "workload", run, PRECISION)
        (run / "training").mkdir()
        follower = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.records", "--follow", run],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert follower.stdin and follower.stdout
        follower.stdout.readline()  # it has connected
        patched = {"step": timed(TrainingLog.step, True), "completions": timed(TrainingLog.completions, False)}
        with mock.patch.multiple(TrainingLog, **patched):
            train(run, run / "training")
        follower.stdin.close()
        traces = json.loads(follower.stdout.read())
        follower.wait()
    length = median(after - before for before, after in pairwise(steps[WARM_UP - 1 :]))
    written = median(writing[WARM_UP : len(steps)])
    counted = len(steps) - WARM_UP
    of_flow = (cpu[-1] - cpu[WARM_UP - 1]) / counted
    wall = (steps[-1] - steps[WARM_UP - 1]) / counted
    return {
        "steps": counted,
        "step_seconds": length,
        "writing_seconds": written,
        "writing_share": written / length,
        "writing_cpu_seconds": median(computing[WARM_UP : len(steps)]),
        "step_cpu_seconds": median(after - before for before, after in pairwise(used[WARM_UP - 1 :])),
        "flow_cpu_seconds": of_flow,
        "flow_share": of_flow / wall,
        "traces_cpu_seconds": traces / len(steps),
        "traces_share": traces / (steps[-1] - steps[0]),
    }


def _pace(workload: Workload, folder: Path) -> float:
    """Seconds per step of a short training."""
    from grpo_core.training.log import TrainingLog
    from grpo_core.training.loop import train

    ended: list[float] = []
    record = TrainingLog.step

    def step(self: Any, *values: Any) -> None:
        record(self, *values)
        ended.append(time.perf_counter())

    run_directory(replace(workload, steps=2 * WARM_UP), folder / "workload", folder / "short", PRECISION)
    with mock.patch.object(TrainingLog, "step", step):
        train(folder / "short", folder / "short" / "training")
    return median(after - before for before, after in pairwise(ended))


def follow(run: Path) -> None:
    """Do what a flow's process does beside its training, until stdin is closed."""
    import mlflow

    from grpo_core.config.files import load_config
    from tasks.tracking import traces
    from tasks.tracking.sending import sending

    os.environ["MLFLOW_TRACKING_URI"] = uri = f"sqlite:///{run / 'mlflow.db'}"
    mlflow.set_tracking_uri(uri)
    logging.getLogger("mlflow").setLevel(logging.ERROR)
    info = mlflow.MlflowClient().create_run("0").info
    tracked = {"run_id": info.run_id, "experiment_id": "0", "start_time": info.start_time}
    log, config = logging.getLogger("records"), load_config(run / "config.toml")
    seconds, send = [0.0], traces._send_batch

    def timed(*arguments: Any) -> None:
        begun = time.thread_time()
        send(*arguments)
        seconds.append(time.thread_time() - begun)

    with (
        mock.patch.object(traces, "_send_batch", timed),
        sending(run / "training", tracked, log),
        traces.tracing(run / "training", tracked, config, log),
    ):
        print("connected", flush=True)
        sys.stdin.read()
        while_it_ran = sum(seconds)  # without what is sent at the end
    print(json.dumps(while_it_ran), flush=True)


if __name__ == "__main__":
    main()
