"""Shows a running training in Prefect: its output in the log, its figures and curves in artifacts."""

from __future__ import annotations

import base64
import io
import json
import logging
import re
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast
from uuid import UUID

from prefect.artifacts import create_progress_artifact, create_table_artifact
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactUpdate

from grpo_core import run_files
from grpo_core.planning.plan import Plan
from tasks.rendering.drawing import Row, draw_curves
from tasks.rendering.figures import NONE, duration
from tasks.rendering.visible import shortened
from tasks.tracking.artifacts import show_markdown, show_or_say
from tasks.tracking.runs import run_page

OUTPUT, CURVES = "output.log", "curves.png"
LINES_PER_SECOND = 5.0  # into the log, on average; warnings have the same rate in addition
LINES_AT_ONCE = 50.0
LINES_AGAIN = 10.0  # logged in a row after lines were left out, to show passages rather than single lines
LAST_LINES = 20  # of the omitted lines, logged at the end
LONGEST_LINE = 2000  # characters
ALARM = re.compile(r"\b(error|warning|traceback)\b|\w(Error|Warning)\b", re.IGNORECASE)
FINDING = re.compile(r"([\w.-]+: )?health:")  # after the machine's name, if there are several
MACHINE = re.compile(r"time/machine_\d+/tokens_per_second")
TURNS, FAILED_CALLS = "conversations/mean_turns", "conversations/failed_tool_calls"  # per conversation
SECONDS_BETWEEN_UPDATES = 5.0  # each takes CPU time from the training, here and in Prefect's server
ROWS = 20


class Output:
    """Writes every line to a file, and to the log at a limited rate; the log says how many lines it lacks.

    Health findings and the last lines are never left out; errors and warnings have their own rate.
    """

    def __init__(self, path: Path, log: Any, clock: Callable[[], float] = time.monotonic):
        self.file = path.open("a")
        self.log, self.clock = log, clock
        self.credit, self.counted = {True: LINES_AT_ONCE, False: LINES_AT_ONCE}, clock()  # by whether it is an alarm
        self.needed = {True: 1.0, False: 1.0}  # credit that logging the next line needs
        self.left_out = 0
        self.last: deque[str] = deque(maxlen=LAST_LINES)  # of the omitted lines

    def line(self, line: str) -> None:
        self.file.write(line + "\n")
        self.file.flush()
        earned, self.counted = (self.clock() - self.counted) * LINES_PER_SECOND, self.clock()
        self.credit = {kind: min(LINES_AT_ONCE, credit + earned) for kind, credit in self.credit.items()}
        finding = FINDING.match(line) is not None
        kind = ALARM.search(line) is not None
        if not finding and self.credit[kind] < self.needed[kind]:
            self.needed[kind] = LINES_AGAIN
            self.left_out += 1
            self.last.append(line)
            return
        if not finding:
            self.credit[kind] -= 1
            self.needed[kind] = 1.0
        self._say_left_out(self.left_out)
        self.last.clear()
        self._log(line)

    def close(self) -> None:
        """Log the last omitted lines."""
        self._say_left_out(self.left_out - len(self.last))
        for line in self.last:
            self._log(line)
        self.last.clear()
        self.file.close()

    def _say_left_out(self, lines: int) -> None:
        if lines:
            self.log.info("… %d more lines in %s", lines, OUTPUT)
        self.left_out = 0

    def _log(self, line: str) -> None:
        level = logging.WARNING if line.startswith("health:") else logging.INFO
        self.log.log(level, "%s", shortened(line, LONGEST_LINE))


class Figures:
    """Reads metrics.jsonl as it grows: each line once, and again if the file was rewritten."""

    def __init__(self, path: Path):
        self.path = path
        self.file: io.BufferedReader | None = None
        self.inode = 0

    def read(self) -> Iterator[Row]:
        """Yield the rows that have not been read yet, oldest first."""
        if not self.path.exists():
            return
        if self.file is None or self.path.stat().st_ino != self.inode:
            self.close()
            self.file, self.inode = self.path.open("rb"), self.path.stat().st_ino
        while (line := self.file.readline()).endswith(b"\n"):
            yield json.loads(line)
        self.file.seek(-len(line), io.SEEK_CUR)  # the line is still being written

    def close(self) -> None:
        if self.file is not None:
            self.file.close()


class Live:
    """A progress artifact and a table of a training, kept up to date while it runs. `mlflow_run`: Markdown link, shown
    with the table."""

    def __init__(self, metrics: Path, plan: Plan, mlflow_run: str):
        self.figures, self.plan, self.mlflow_run = Figures(metrics), plan, mlflow_run
        self.rows: deque[Row] = deque(maxlen=ROWS + 1)  # a row's tokens are counted from the row before
        self.progress: UUID | None = None
        self.table: UUID | None = None
        self.said = False
        self.show()

    def refresh(self) -> None:
        """Show the newest figures, at most once in SECONDS_BETWEEN_UPDATES."""
        if time.monotonic() - self.shown > SECONDS_BETWEEN_UPDATES:
            self.show()

    def show(self) -> None:
        """Show the newest figures. A server that does not answer does not end the training."""
        self.said |= not show_or_say("training-progress", self._show, self.said)
        self.shown = time.monotonic()

    def _show(self) -> None:
        if self.progress is None:
            made = create_progress_artifact(0.0, key="training-progress", description="starting")
            self.progress = cast(UUID, made)  # to a type checker, Prefect's functions may return a coroutine
        for row in self.figures.read():
            if self.rows and row["step"] <= self.rows[-1]["step"]:  # the training went back
                self.rows.clear()
            self.rows.append(row)
        if not (rows := [*self.rows]):
            return
        table = live_table(rows, self.plan)
        done = f"{rows[-1]['step']}/{self.plan.max_steps} updates, reward {_reward(rows[-1])}"
        left = f", {table[0]['time left']} left" if rows[-1]["step"] < self.plan.max_steps else ""
        left += machines_line(rows[-1])
        percent = 100.0 * rows[-1]["step"] / self.plan.max_steps
        changes = {self.progress: ArtifactUpdate(data=percent, description=done + left)}
        if self.table is None:
            said = f"The newest updates. MLflow run: {self.mlflow_run}"
            self.table = cast(UUID, create_table_artifact(table, key="training-live", description=said))
        else:
            changes[self.table] = ArtifactUpdate(data=json.dumps(table))
        with get_client(sync_client=True) as client:  # one for both: it reads all certificates, whatever the address
            for artifact, change in changes.items():
                client.update_artifact(artifact, change)


def live_table(rows: Sequence[Row], plan: Plan) -> list[dict[str, Any]]:
    """Table of the newest ROWS updates, newest first; the time left assumes their median pace for the rest of the
    plan, since the first update warms up."""
    table: list[dict[str, Any]] = []
    for position, row in enumerate(rows):
        times = [earlier["step_time"] for earlier in rows[: position + 1]]
        before = rows[position - 1]["num_tokens"] if position else None
        # All tokens of the first update are its own.
        tokens = row["num_tokens"] - (before or 0) if before is not None or row["step"] == 1 else None
        table.append(
            {
                "step": row["step"],
                "reward": _reward(row),
                **({"KL": f"{row['kl']:.4f}"} if "kl" in row else {}),
                "length": f"{row['completions/mean_length']:.1f}",
                **({"turns": f"{row[TURNS]:.1f}"} if TURNS in row else {}),
                **({"failed calls": f"{row[FAILED_CALLS]:.2f}"} if FAILED_CALLS in row else {}),
                "tokens/s": "" if tokens is None else f"{tokens / row['step_time']:,.0f}",
                "time left": duration((plan.max_steps - row["step"]) * statistics.median(times)),
            }
        )
    return table[::-1][:ROWS]


def _reward(row: Row) -> str:
    return f"{row['reward']:.3f}" if "reward" in row else NONE  # no function scored a completion


def machines_line(row: Row) -> str:
    """Sampling rate of each machine, as the end of a sentence; "" for a single machine."""
    rates = [f"{value:,.0f}" for name, value in row.items() if MACHINE.fullmatch(name)]
    return f"; the machines sample {', '.join(rates)} tokens/s" if rates else ""


def show_curves(folder: Path) -> None:
    """Draw the training's curves so far into a picture in `folder`, and make an artifact with it and a link to the
    MLflow run."""
    metrics = folder / run_files.METRICS
    rows = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    parts = [f"# Training\n\nMLflow run: {run_page(folder)}"]
    if rows:
        (folder / CURVES).write_bytes(picture := draw_curves(rows))
        parts.append(f"![training curves](data:image/png;base64,{base64.b64encode(picture).decode()})")
    show_markdown("training-curves", "\n\n".join(parts), "Curves, and the MLflow run")
