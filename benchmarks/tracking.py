"""What sending figures to MLflow costs a training: the quickstart's, its seconds an update.

    python -m benchmarks.tracking

One training, under it in turn: no tracking, MLflow's SQLite file, an MLflow server on this machine, and one that takes
a second to answer each call. The order turns with each round, so that what else the machine does falls on all alike.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from shutil import copy
from typing import Any

import httpx
import mlflow
import pyarrow.parquet as pq

from benchmarks.workload import SUMS
from grpo_core.config import dump_config, load_config
from grpo_core.plan import make_plan, plan_inputs
from tasks.live import Figures, Row
from tasks.sending import sending
from tests.serving import free_ports, mlflow_server

ARMS = ("none", "sqlite", "server", "slow server")
ROUNDS = 4
BLOCK = 60  # updates
STARTING = 15  # of these, not counted: the sender connects, once in a training
DELAY = 1.0  # seconds
ROOT = Path(__file__).parents[1]


def main() -> None:
    seconds: dict[str, list[float]] = {arm: [] for arm in ARMS}
    logging.disable()  # the training goes on when a turn ends, so that what MLflow has is never all
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        folder = Path(scratch)
        _write_run(folder / "run")
        [port] = free_ports(1)
        stack.enter_context(mlflow_server(folder, port))
        slow = stack.enter_context(_delayed(f"http://127.0.0.1:{port}"))
        uris = {
            "sqlite": f"sqlite:///{folder / 'file.db'}",
            "server": f"http://127.0.0.1:{port}",
            "slow server": slow,
        }
        runs = {arm: _new_run(uri) for arm, uri in uris.items()}
        rows = stack.enter_context(_training(folder / "run"))
        deque(itertools.islice(rows, BLOCK), maxlen=0)  # warm-up
        for round in range(ROUNDS):
            for place in range(len(ARMS)):
                arm = ARMS[(place + round) % len(ARMS)]
                with _tracking(uris.get(arm), runs.get(arm), folder / "run" / "training"):
                    own = (row["step_time"] for row in _done_after(time.time(), rows))
                    block = [*itertools.islice(own, BLOCK)]
                seconds[arm] += block[STARTING:]
            print(f"round {round + 1} of {ROUNDS}", file=sys.stderr, flush=True)
    base = statistics.median(seconds["none"])
    print("tracking       seconds an update, median   ratio to none")
    for arm in ARMS:
        median = statistics.median(seconds[arm])
        print(f"{arm:14} {median:26.4f} {median / base:15.3f}")


def _write_run(run: Path) -> None:
    """A run directory of the quickstart, without an end."""
    make = [sys.executable, str(ROOT / "examples" / "arithmetic" / "make.py"), "--out", str(SUMS)]
    subprocess.run(make, check=True, stdout=subprocess.DEVNULL)
    overrides = [f"model.name_or_path={SUMS / 'base'}", "rollout.engine=transformers", "train.max_steps=100000"]
    config = load_config(ROOT / "configs" / "quickstart.toml", overrides)
    prompts = pq.read_metadata(SUMS / "train.parquet").num_rows
    (run / "dataset").mkdir(parents=True)
    for name in ("train", "eval"):
        copy(SUMS / f"{name}.parquet", run / "dataset")
    (run / "config.toml").write_text(dump_config(config))
    (run / "plan.json").write_text(json.dumps({"plan": asdict(make_plan(plan_inputs(config, prompts)))}))


@contextmanager
def _training(run: Path) -> Iterator[Iterator[Row]]:
    """The rows of its metrics as they come; it is killed when the body ends."""
    one = ["--num_processes", "1", "--num_machines", "1", "--dynamo_backend", "no", "--mixed_precision", "no"]
    command = [sys.executable, "-m", "accelerate.commands.launch", *one, "-m", "grpo_core.train", str(run)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)

    def rows() -> Iterator[Row]:
        figures = Figures(run / "training" / "metrics.jsonl")
        while process.poll() is None:
            yield from figures.read()
            time.sleep(0.02)
        raise RuntimeError(f"the training ended with status {process.returncode}")

    try:
        yield rows()
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _done_after(moment: float, rows: Iterator[Row]) -> Iterator[Row]:
    return itertools.dropwhile(lambda row: row["timestamp"] < moment, rows)


def _new_run(uri: str) -> dict[str, Any]:
    mlflow.set_tracking_uri(uri)
    info = mlflow.MlflowClient().create_run("0").info
    return {"run_id": info.run_id, "start_time": info.start_time}


@contextmanager
def _tracking(uri: str | None, run: dict[str, Any] | None, training: Path) -> Iterator[None]:
    if uri is None or run is None:
        yield
        return
    os.environ["MLFLOW_TRACKING_URI"] = uri
    with sending(training, run, logging.getLogger("sending")):
        yield


@contextmanager
def _delayed(url: str) -> Iterator[str]:
    """The URL of a server that passes on what it is asked, and takes DELAY seconds more to answer."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            time.sleep(DELAY)
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            headers = {"Content-Type": self.headers.get("Content-Type", "application/json")}
            answer = httpx.request(self.command, url + self.path, content=body, headers=headers)
            self.send_response(answer.status_code)
            self.send_header("Content-Length", str(len(answer.content)))
            self.end_headers()
            self.wfile.write(answer.content)

        do_POST = do_PUT = do_PATCH = do_GET

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


if __name__ == "__main__":
    main()
