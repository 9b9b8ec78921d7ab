"""Machines that a scheduler gives, by one job for all of them. The stage needs no connection to them: they exchange
files in a folder on the shared disk.

A scheduler is three functions (`Scheduler`), and `batch(SCHEDULER)` is the launcher. Each machine of the job runs
`python -m tasks.processes.scheduled FOLDER`; its number, from 0, is in a variable that `scheduled.NUMBERS` names. For
each machine, `tasks.processes.follow` runs here. FOLDER is new for each start of the processes, in the run's folder,
and only this user can read it. For machine N it has

    N.answer     machine N's answer to the start check, with its name, address and a free port
    N.request    the command to run there, and the environment with its secrets: removed as soon as it is read
    N.stage      the stage's sign of life for machine N, and whether to stop
    N.machine    the sign of life of machine N, whether it was told to stop, and in the end its exit status
    told         exists once a machine was told to stop: then all others are told by N.stage
    N.output     output of the processes there
    stage        the stage's sign of life until the requests are there
    job          the scheduler's name of the job
    job.log      output of the job itself, if the scheduler can write it there; its end is shown if the job fails

The stage waits for machines as long as the scheduler does. When the processes have ended, in whatever way, the job is
cancelled and FOLDER removed. If the stage is killed, the machines end everything after SILENCE_SECONDS, and a job that
is still waiting ends as soon as it runs; the next stage cancels any job left over.
"""

from __future__ import annotations

import collections
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from grpo_core.config.run import RunConfig
from tasks.processes.launchers.machines import Launcher, Machine, why_unfit
from tasks.processes.run import TAIL_LINES, ProcessError, TakenError, training_python
from tasks.processes.signs_of_life import BEAT_SECONDS, ENDING_SECONDS, POLL_SECONDS, SILENCE_SECONDS, Signs
from tasks.stages.errors import StageError
from tasks.stages.files import write_text

PREFIX = ".machines-"
LOOK_SECONDS = 5.0  # between looks at the job
ANSWER_SECONDS = 300.0  # for all machines of a running job to answer; Python's first start there is slow
END_SECONDS = 15.0  # for a job to end by itself once its machines have ended


@dataclass(frozen=True)
class Job:
    """A job's state, as its scheduler reports it."""

    state: Literal["waiting", "running", "ended"]
    """`ended`: no process of it runs any more."""
    reason: str = ""
    """Reason of this state, in the scheduler's words."""
    ended_by: Literal["itself", "person", "scheduler"] = "itself"
    """`person`: somebody cancelled it. `scheduler`: pre-emption, time limit, a machine that failed."""


class SchedulerError(StageError):
    """Raised if a scheduler refuses a request or does not answer; the message quotes it."""


@dataclass(frozen=True)
class Scheduler:
    """The three functions of a scheduler. Each returns within 30 s, or raises SchedulerError."""

    name: str
    """Name of the scheduler in messages."""
    submit: Callable[[RunConfig, list[str], Path], str]
    """Submit a job that runs the command (an argv, the same on each machine) on RunConfig.num_machines machines, in
    this working directory; the folder is FOLDER. The scheduler must not start the job again by itself, and a machine
    that ends must not end the others. Returns the scheduler's name of the job, by which any process can find it."""
    look: Callable[[str], Job]
    """Return the state of the job. A job that the scheduler no longer knows has ended."""
    cancel: Callable[[str], None]
    """Ask the scheduler to end the job: SIGTERM to its machines, and some time later SIGKILL. Does nothing if it has
    ended."""


def batch(scheduler: Scheduler) -> Launcher:
    """Make the launcher that takes machines from this scheduler."""
    return partial(_machines, scheduler)


@contextmanager
def _machines(
    scheduler: Scheduler, config: RunConfig, folder: Path, patience: float, say: Callable[[str], None]
) -> Iterator[list[Machine]]:
    for left in folder.glob(f"{PREFIX}*"):  # left by a stage that was killed
        with suppress(FileNotFoundError):
            _end_job(scheduler, (left / "job").read_text(), say, linger=0.0)
        shutil.rmtree(left, ignore_errors=True)
    shared, job = _submit(scheduler, config, folder, patience)
    linger = 0.0
    try:
        write_text(shared / "job", job)
        answers = _await_answers(scheduler, job, config.num_machines, shared, say)
        for answer in answers:
            if reason := why_unfit(answer["name"], answer, folder):
                raise StageError(reason)
        nodes = collections.Counter(answer["name"] for answer in answers)
        machines = [
            Machine(
                # Pods that use the network of the same node share its name.
                name=answer["name"] if nodes[answer["name"]] == 1 else f"{answer['name']}-{number}",
                command=["-m", "tasks.processes.follow", str(shared), str(number)],
                address=answer["address"],
                port=answer["port"],
                grace=SILENCE_SECONDS + ENDING_SECONDS,
            )
            for number, answer in enumerate(answers)
        ]
        linger = END_SECONDS
        try:
            yield machines
        except ProcessError as error:
            raise _with_scheduler_reason(error, scheduler, job) from error
    finally:
        _end_job(scheduler, job, say, linger)
        shutil.rmtree(shared, ignore_errors=True)


def command(shared: Path) -> list[str]:
    """Command that each machine runs, by this Python."""
    path = [f"PYTHONPATH={os.environ['PYTHONPATH']}"] if "PYTHONPATH" in os.environ else []
    return ["env", *path, "PYTHONSAFEPATH=1", training_python(), "-m", "tasks.processes.scheduled", str(shared)]


def _submit(scheduler: Scheduler, config: RunConfig, folder: Path, patience: float) -> tuple[Path, str]:
    """Submit the job; returns FOLDER and the job. Each try has a FOLDER of its own: a scheduler that does not answer in
    time may have accepted the job all the same, and its machines end once their FOLDER is gone."""
    deadline = time.monotonic() + patience
    while True:
        shared = folder.absolute() / f"{PREFIX}{secrets.token_hex(8)}"
        shared.mkdir(mode=0o700)
        try:
            return shared, scheduler.submit(config, command(shared), shared)
        except BaseException as error:
            shutil.rmtree(shared, ignore_errors=True)
            if not isinstance(error, SchedulerError) or time.monotonic() > deadline:
                raise
        time.sleep(LOOK_SECONDS)


def _await_answers(
    scheduler: Scheduler, job: str, count: int, shared: Path, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Wait for the answers of all machines to the start check; returns them by number. Raises StageError if the job
    ends before."""
    said, beats, next_beat, next_look = "", 0, 0.0, 0.0
    deadline = float("inf")  # of the answers; set once the job runs
    signs = [Signs(shared / f"{number}.answer") for number in range(count)]
    while True:
        for sign in signs:
            sign.read()
        answers = [sign.content for sign in signs]
        if all(answers):
            names = ", ".join(answer["name"] for answer in answers)
            say(f"{scheduler.name}: job {job} runs on {names}")
            return answers
        now = time.monotonic()
        if now >= next_beat:
            beats, next_beat = beats + 1, now + BEAT_SECONDS
            with suppress(OSError):  # the next sign may arrive
                write_text(shared / "stage", json.dumps({"beats": beats}))
        if now >= next_look:
            next_look = now + LOOK_SECONDS
            found = None
            try:
                found = scheduler.look(job)
                line = f"{scheduler.name}: job {job} is {found.state}" + f" ({found.reason})" * bool(found.reason)
            except SchedulerError as error:  # it may be back soon
                line = str(error)
            if line != said:
                say(said := line)
            if found and found.state == "ended":
                _refuse_ended(found, scheduler, job, shared)
            if found:
                deadline = min(deadline, now + ANSWER_SECONDS) if found.state == "running" else float("inf")
        if now > deadline:
            silent = ", ".join(str(number) for number, answer in enumerate(answers) if not answer)
            raise StageError(
                f"{scheduler.name} has run job {job} for {ANSWER_SECONDS:g} s, but its machines {silent} have not "
                f"answered in {shared}: the storage root (GRPO_STORAGE) has to be on a disk that all machines share, "
                f"under the same path. {_output_tail(shared)}"
            )
        time.sleep(POLL_SECONDS)


def _refuse_ended(found: Job, scheduler: Scheduler, job: str, shared: Path) -> None:
    """Raises StageError for a job that has ended before all its machines answered."""
    if found.ended_by == "person":
        raise _cancelled_error(scheduler, job)
    message = (
        f"{scheduler.name} ended job {job} before all its machines had started: {found.reason}. {_output_tail(shared)}"
    )
    if found.ended_by == "scheduler":
        raise TakenError(message, restartable=True)
    raise StageError(message)


def _output_tail(shared: Path) -> str:
    """Quote the end of the job's output, as a sentence."""
    try:
        with (shared / "job.log").open(errors="replace") as lines:
            return "The end of its output:\n" + "".join(collections.deque(lines, TAIL_LINES))
    except OSError:
        return "It printed nothing"


def _with_scheduler_reason(error: ProcessError, scheduler: Scheduler, job: str) -> StageError:
    """Add the scheduler's reason to the error, if the scheduler ended the job."""
    found = _await_end(scheduler, job, ENDING_SECONDS if error.told else END_SECONDS)
    if found and found.ended_by == "person":
        return _cancelled_error(scheduler, job)
    if found and found.ended_by == "scheduler":
        error = ProcessError(
            f"{scheduler.name} ended job {job} ({found.reason}): {error}", error.restartable, error.told
        )
    return TakenError(str(error), restartable=True, told=True) if error.told else error


def _cancelled_error(scheduler: Scheduler, job: str) -> StageError:
    return StageError(
        f"somebody cancelled job {job} in {scheduler.name}; run the stage again to go on from the newest checkpoint"
    )


def _await_end(scheduler: Scheduler, job: str, seconds: float) -> Job | None:
    """Wait up to `seconds` until the job has ended, and return its state; None if it has not ended."""
    deadline, pause = time.monotonic() + seconds, POLL_SECONDS
    while True:
        with suppress(SchedulerError):
            found = scheduler.look(job)
            if found.state == "ended":
                return found
        if time.monotonic() > deadline:
            return None
        time.sleep(pause)
        pause = min(2 * pause, LOOK_SECONDS)


def _end_job(scheduler: Scheduler, job: str, say: Callable[[str], None], linger: float) -> None:
    """End the job: give it `linger` seconds to end by itself, then cancel it."""
    if _await_end(scheduler, job, linger):
        return
    problem = "it still runs"
    try:
        scheduler.cancel(job)
    except SchedulerError as error:
        problem = str(error)
    if not _await_end(scheduler, job, ENDING_SECONDS):
        say(f"{scheduler.name}: job {job} was cancelled and has not ended ({problem}); its machines end by themselves")
