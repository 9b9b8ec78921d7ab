"""The `grpo up` that serves a storage root: it writes its addresses into STORAGE/up.json, and locks that file while it
runs."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import TextIO

import psutil

from grpo_core.errors import GrpoError
from tasks.stages.locks import lock
from tasks.stages.run_directory import storage_root

LOCK_SECONDS = 1.0  # to try for the lock; a command that only looks at it holds it for less


class ServerError(GrpoError):
    """Raised if there is no server to work with, or one that must not be used; the message says what to do."""


@dataclass(frozen=True)
class Up:
    """A running `grpo up`. `server_id`: part of every answer of its Prefect server, so that no other is mistaken for
    it."""

    prefect_url: str
    mlflow_url: str
    server_id: str
    pid: int
    user: str
    host: str
    since: str

    def __str__(self) -> str:
        return f"`grpo up` (process {self.pid} of {self.user} on {self.host}, since {self.since})"


def new_up(prefect_url: str, mlflow_url: str) -> Up:
    """Describe this process as the `grpo up` that serves at these addresses."""
    since = f"{datetime.now().astimezone():%Y-%m-%d %H:%M}"
    user = psutil.Process().username()
    return Up(prefect_url, mlflow_url, secrets.token_hex(8), os.getpid(), user, socket.gethostname(), since)


@contextmanager
def announced(up: Up) -> Iterator[None]:
    """Announce this process as the one that serves this storage. Raises ServerError if another process serves it."""
    storage_root().mkdir(parents=True, exist_ok=True)
    try:
        opened = _file().open("a+")
    except OSError as error:
        raise ServerError(f"{_file()} cannot be written ({error.strerror}): move it away, or correct it") from error
    with opened as file:
        if not _locked(file):
            other = _read() or "another `grpo up`"
            where = f" at {other.prefect_url} and {other.mlflow_url}" if isinstance(other, Up) else ""
            raise ServerError(
                f"{storage_root()} is served already{where}, by {other}: use that one, or end it first (Ctrl-C)"
            )
        file.truncate(0)
        file.write(json.dumps(asdict(up)) + "\n")
        file.flush()
        try:
            yield
        finally:
            file.truncate(0)


def _locked(file: TextIO) -> bool:
    """Try to get the lock; returns True if this process has it. Another `find_up` holds it for an instant, another
    `grpo up` for as long as it runs."""
    deadline = time.monotonic() + LOCK_SECONDS
    while not (has_lock := lock(file.fileno())) and time.monotonic() <= deadline:
        time.sleep(0.01)
    return has_lock


def find_up() -> Up | None:
    """Return the `grpo up` that serves this storage on this machine, even if it is still starting; None if there is
    none."""
    try:
        with _file().open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        up = _read()
        return up if up and up.host == socket.gethostname() else None
    except (FileNotFoundError, IsADirectoryError):
        pass
    return None


def _read() -> Up | None:
    """Read the file; None if it is still empty, or if another version of grpo wrote it."""
    with suppress(ValueError, TypeError):
        return Up(**json.loads(_file().read_text()))
    return None


def _file() -> Path:
    return storage_root() / "up.json"
