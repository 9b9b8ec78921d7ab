"""What a launcher gives: the machines that a training runs on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_core.config.run import RunConfig
from tasks.processes.machine import code_version
from tasks.processes.run import GRACE_SECONDS
from tasks.stages.errors import StageError


@dataclass(frozen=True)
class Machine:
    """A machine, and how to start processes on it."""

    name: str
    """Name of the machine in logs, and of its log file."""
    command: Sequence[str]
    """Arguments of `python` here that run `python` there, to be followed by the arguments of that. The command
    ends with its exit status; whatever ends the command ends all processes there."""
    address: str
    """Address at which the other machines reach it."""
    port: int
    """A free port of that address."""
    grace: float = GRACE_SECONDS
    """Seconds that the command needs at most to end what it has started, when told to, or to find that the machine is
    lost."""


Launcher = Callable[[RunConfig, Path, float, Callable[[str], None]], AbstractContextManager[list[Machine]]]
"""Gives RunConfig.num_machines machines, for one start of the processes; the folder is one of the run, which each of
them has to see. Raises StageError if they cannot be had within so many seconds, or do not see the folder. The function
is told in lines what is waited for."""


def refuse_unfit(host: str, answer: dict[str, Any], folder: Path) -> None:
    """Raises StageError if the training cannot run on this host, by what it answers to the start check."""
    if not answer["sees_run"]:
        raise StageError(
            f"{host} does not see {folder.absolute()} as this machine does: put the storage root (GRPO_STORAGE) on a "
            "disk that all machines share, under the same path"
        )
    if answer["version"] != (own := code_version()):
        raise StageError(f"{host} has {answer['version']}, and this machine {own}: install the same on both")
    if answer["problem"]:
        raise StageError(f"{host}: {answer['problem']}")
