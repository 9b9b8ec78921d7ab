"""Sends a training's figures to MLflow while it runs, from a thread of its own: whatever the server does, training
continues.

The figures come from metrics.jsonl. SENT_FILE beside it holds the timestamp of the newest row that MLflow accepted.
Rows are sent in order, so a later attempt, or register, continues after that row. A row sent twice, because the answer
or the timestamp was lost, is one row to MLflow, which identifies a figure by name, step, timestamp and value.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric
from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

from grpo_core import run_files
from tasks.rendering.drawing import Row
from tasks.stages.errors import ArmStopped
from tasks.stages.files import write_text
from tasks.stages.mlflow_address import first_cause, tracking_uri
from tasks.tracking.live import CURVES, Figures
from tasks.tracking.runs import brief_requests, connect

SENT_FILE = "mlflow_sent"
ROWS_AT_ONCE = 25
ROWS_BETWEEN_LINES = 1000  # rows per line in the log, a multiple of ROWS_AT_ONCE
METRICS_PER_REQUEST = 1000  # MLflow's maximum
SECONDS_BETWEEN_SENDINGS = 2.0
SECONDS_BETWEEN_MEASUREMENTS = 10.0
MEASUREMENTS_KEPT = 1000  # while the server does not answer
LAST_SECONDS = 30.0  # to send what is left when a training has ended well
CANCELLED_SECONDS = 3.0  # the same if it was cancelled or failed: it should end soon


@contextmanager
def sending(folder: Path, tracked: Mapping[str, Any], log: Any) -> Iterator[None]:
    """While the body runs, send MLflow the rows of `folder`'s metrics.jsonl as they are written, and the load of the
    machine; then the remaining rows, the picture of the curves, and how the training ended: FINISHED, FAILED or KILLED.

    Waits at the end for a limited time; the log says what MLflow still lacks then.
    """
    sender = _Sender(folder, tracked, log)
    status, seconds = "FINISHED", LAST_SECONDS
    with brief_requests():
        thread = threading.Thread(target=sender.run, name="MLflow sender", daemon=True)
        thread.start()
        try:
            yield
        except BaseException as error:
            failed = isinstance(error, Exception) and not isinstance(error, ArmStopped)
            status, seconds = ("FAILED" if failed else "KILLED"), CANCELLED_SECONDS
            raise
        finally:
            sender.status = status
            sender.ended.set()
            thread.join(seconds)
            sender.given_up.set()
            if not sender.closed:
                lacks = sum(1 for _ in _unsent(folder, Figures(folder / run_files.METRICS)))
                log.warning(
                    "MLflow does not answer: it lacks the figures of %d updates and how the training ended. They are "
                    "in metrics.jsonl; the next attempt sends them, or register",
                    lacks,
                )


def send_rest(client: MlflowClient, run_id: str, folder: Path, log: Any) -> None:
    """Send the rows of `folder`'s metrics.jsonl that MLflow has not accepted, and log the progress. Errors of the
    client are not caught."""
    rows = [*_unsent(folder, Figures(folder / run_files.METRICS))]
    for first in range(0, len(rows), ROWS_AT_ONCE):
        if first % ROWS_BETWEEN_LINES == 0:
            log.info("MLflow has %d of the last %d updates: sending the others", first, len(rows))
        _send(client, run_id, folder, rows[first : first + ROWS_AT_ONCE])


class _Sender:
    """The thread that sends. To try again, it keeps what the server did not accept: a batch of rows, and
    measurements."""

    def __init__(self, folder: Path, tracked: Mapping[str, Any], log: Any):
        self.folder, self.tracked, self.log = folder, tracked, log
        self.ended, self.given_up = threading.Event(), threading.Event()
        self.status = "RUNNING"
        self.closed = False
        self.figures = Figures(folder / run_files.METRICS)
        self.rows: Iterator[Row] = iter(())
        self.batch: list[Row] = []
        self.measurements: deque[list[Metric]] = deque(maxlen=MEASUREMENTS_KEPT)

    def run(self) -> None:
        client: MlflowClient | None = None
        run_id, answers = self.tracked["run_id"], True
        # The monitor's own thread is not used: it stops after the first failed call. Without the URI, the monitor would
        # create a database in the current folder.
        monitor = SystemMetricsMonitor(run_id, tracking_uri=tracking_uri())
        with suppress(Exception):
            _measure(monitor, 0)  # starts the interval over which the next rates are measured
        measured = time.monotonic()
        more = False
        while not (self.closed or self.given_up.is_set()):
            if not more:
                (self.ended if answers or not self.ended.is_set() else self.given_up).wait(SECONDS_BETWEEN_SENDINGS)
            ended = self.ended.is_set()
            if time.monotonic() - measured > SECONDS_BETWEEN_MEASUREMENTS:
                measured = time.monotonic()
                with suppress(Exception):  # a GPU that does not answer must not stop the sending
                    self.measurements.append(_measure(monitor, self.tracked["start_time"]))
            try:
                if client is None:
                    (new := connect()).update_run(run_id, status="RUNNING")  # an earlier attempt may have ended the run
                    client = new
                more = self._send_batch(client, run_id)
                while self.measurements:
                    client.log_batch(run_id, self.measurements[0])
                    self.measurements.popleft()
                if ended and not more:
                    if (picture := self.folder / CURVES).exists():
                        client.log_artifact(run_id, str(picture), "training")
                    client.set_terminated(run_id, self.status)
                    self.closed = True
                if not answers:
                    self.log.info("MLflow answers again")
                answers = True
            except Exception as error:
                if answers and not self.given_up.is_set():
                    self.log.warning("MLflow does not accept the figures; trying again: %s", first_cause(error))
                answers = more = False
        self.figures.close()

    def _send_batch(self, client: MlflowClient, run_id: str) -> bool:
        """Send the next batch of rows; returns True if there was one."""
        if not self.batch:
            self.batch = [*itertools.islice(self.rows, ROWS_AT_ONCE)]
        if not self.batch:  # all known rows are sent; look for new ones
            self.rows = _unsent(self.folder, self.figures)
            self.batch = [*itertools.islice(self.rows, ROWS_AT_ONCE)]
        if not self.batch:
            return False
        _send(client, run_id, self.folder, self.batch)
        self.batch = []
        return True


def _unsent(folder: Path, figures: Figures) -> Iterator[Row]:
    """Yield the rows that have not been read yet and that MLflow has not accepted. A repeated step has a later
    timestamp."""
    sent = folder / SENT_FILE
    newest = 0.0
    with suppress(FileNotFoundError, ValueError):  # empty after a power loss; MLflow ignores rows that it already has
        newest = float(sent.read_text())
    return (row for row in figures.read() if row["timestamp"] > newest)


def _send(client: MlflowClient, run_id: str, folder: Path, rows: Sequence[Row]) -> None:
    metrics = [metric for row in rows for metric in _metrics(row)]
    for first in range(0, len(metrics), METRICS_PER_REQUEST):
        client.log_batch(run_id, metrics[first : first + METRICS_PER_REQUEST])
    write_text(folder / SENT_FILE, repr(rows[-1]["timestamp"]))


def _metrics(row: Row) -> list[Metric]:
    figures = dict(row)
    step, milliseconds = int(figures.pop("step")), round(1000 * figures.pop("timestamp"))
    return [Metric(name, value, milliseconds, step) for name, value in figures.items()]


def _measure(monitor: SystemMetricsMonitor, start: int) -> list[Metric]:
    """Load of the machine, under MLflow's names. `start`: of the run, in ms since 1970; steps are seconds since
    then."""
    monitor.collect_metrics()
    figures = monitor.aggregate_metrics()
    for each in monitor.monitors:
        each.clear_metrics()
    now = round(1000 * time.time())
    return [Metric(f"system/{name}", value, now, (now - start) // 1000) for name, value in figures.items()]
