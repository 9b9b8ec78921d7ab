"""The machines that a training runs on, as a launcher gives them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_core.config.run import RunConfig
from tasks.processes.machine import free_port
from tasks.processes.run import GRACE_SECONDS
from tasks.processes.training_machine import training_version


@dataclass(frozen=True)
class Machine:
    """A machine, and how to start processes on it."""

    name: str
    """Name of the machine in logs, and of its log file."""
    command: Sequence[str]
    """Arguments with which `python` here runs `python` there; the arguments for `python` there follow. The command ends
    with the exit status from there; whatever ends the command also ends all processes there."""
    address: str
    """Address at which the other machines reach it."""
    port: int
    """A free port of that address."""
    grace: float = GRACE_SECONDS
    """Longest time in seconds that the command takes to end everything it started, once told to, or to notice that the
    machine is lost."""


Launcher = Callable[[RunConfig, Path, float, Callable[[str], None]], AbstractContextManager[list[Machine]]]
"""Gives RunConfig.num_machines machines, for one start of the processes. Each has to see the folder, which is in the
run's directory. Raises StageError if they are not available within the given seconds, or do not see the folder. The
function gets lines that say what is waited for."""


@contextmanager
def local(config: RunConfig, folder: Path, patience: float, say: Callable[[str], None]) -> Iterator[list[Machine]]:
    """The launcher of this machine."""
    yield [Machine("", [], "127.0.0.1", free_port())]


def why_unfit(host: str, answer: dict[str, Any], folder: Path) -> str:
    """Why, by the host's answer to the start check, the training cannot run there; "" if it can."""
    if not answer["sees_run"]:
        return (
            f"{host} does not see {folder.absolute()} as this machine does: put the storage root (GRPO_STORAGE) on a "
            "disk that all machines share, under the same path"
        )
    if answer["version"] != (own := training_version()):
        return f"{host} has {answer['version']}, but this machine {own}: install the same on both"
    return f"{host}: {answer['problem']}" if answer["problem"] else ""
