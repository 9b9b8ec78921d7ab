"""Servers and other processes that a command starts: each under supervision, so that none outlives the command."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

LINES_SHOWN = 10


@dataclass(frozen=True)
class Child:
    """A process of a command. `name`: for messages; `log`: file that it writes to, None for the terminal."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path | None = None


def start_child(
    name: str,
    module: Sequence[str],
    grace: int,
    log: Path | None = None,
    environment: Mapping[str, str] | None = None,
    descriptors: Sequence[int] = (),
    python: str = sys.executable,
) -> Child:
    """Start `python -m MODULE…` under supervision, in a session of its own, since the terminal's Ctrl-C would end all
    children together. When the pipe closes, the supervisor knows that this process has died.

    `grace`: seconds that it is given to end; `descriptors`: open files that it inherits under the same numbers.
    """
    passed = [option for number in descriptors for option in ("--descriptor", str(number))]
    supervisor = [sys.executable, "-m", "tasks.processes.supervise", *passed, str(grace)]
    with log.open("ab") if log else nullcontext() as output:
        process = subprocess.Popen(
            [*supervisor, python, "-m", *module],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env=environment,
            pass_fds=descriptors,
        )
    return Child(name, process, log)


def describe_end(child: Child) -> str:
    """Return how a child has ended, as the beginning of a sentence. Waits until it has."""
    code = child.process.wait()
    status = code if code >= 0 else 128 - code
    killed = " (SIGKILL, as when memory runs out)" if status == 128 + signal.SIGKILL else ""
    return f"{child.name} has ended, with status {status}{killed}"


def last_error(child: Child) -> str:
    """Return the last line of the child's log that names an error; its last line if none does."""
    lines = child.log.read_text(errors="replace").splitlines() if child.log else []
    named = [line for line in lines if re.match(r"[\w.]+(Error|Exception)\b", line)]
    return [*lines[-1:], *named][-1] if lines else describe_end(child)


def last_words(child: Child) -> str:
    """Return the last lines of the child's log, after its name, as the end of a message; "" if it has none."""
    lines = child.log.read_text(errors="replace").splitlines()[-LINES_SHOWN:] if child.log else []
    return "\n".join([f". It wrote to {child.log}:", *lines]) if lines else ""
