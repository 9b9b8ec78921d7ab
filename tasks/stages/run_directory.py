"""The storage root and the run directory, the contract between stages.

    STORAGE/runs/NAME/     config.toml, rewards/ (copies of its own rewards' modules), dataset/, plan.json, training/,
                           evaluation/, registration.json, errors.log, .lock
    STORAGE/mlflow/        mlflow.db, artifacts/      (unless MLFLOW_TRACKING_URI is set)
    STORAGE/models/        the lock of each registered model
    STORAGE/prefect/       Prefect's home             (unless PREFECT_HOME is set)
    STORAGE/up.json        the `grpo up` that serves all this, locked while it runs

An output is written under a temporary name, flushed to the disk and renamed; what it replaces is kept under
NAME/replaced/. A process that writes into a run's directory holds its lock.
"""

from __future__ import annotations

import difflib
import fcntl
import hashlib
import itertools
import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil

from grpo_core.config.files import KEPT, dump_config
from grpo_core.config.run import RunConfig
from grpo_core.errors import GrpoError
from grpo_core.rewards.contract import files_of
from grpo_core.rewards.modules import place_of
from grpo_core.system.files import publish

# Longer than a supervised process gets to end, checkpoint included.
ENDING_SECONDS = 60.0
POLL_SECONDS = 0.1
NAMES_SHOWN = 5

_locks: set[int] = set()


class RunInUseError(GrpoError):
    """A run that another process writes into; the message says which process, since when and what to do."""


class UnknownRunError(GrpoError):
    """A run that is not under the storage root; the message says where it was looked for and which are there."""


def storage_root() -> Path:
    """The folder that all stages share: $GRPO_STORAGE, else ./storage."""
    return Path(os.environ.get("GRPO_STORAGE", "storage")).resolve()


@contextmanager
def open_run(config: RunConfig, say: Callable[[str], None] = print, wait: bool = False) -> Iterator[Path]:
    """The run's directory, locked as by `locked`, with its resolved configuration and copies of its own rewards' files
    written. Raises RewardError if a reward cannot be imported."""
    own = [reward for reward in config.rewards if ":" in reward.function]
    paths = {place_of(Path(file), reward.function): Path(file) for reward in own for file in files_of(reward)}
    files = {place: path.read_bytes() for place, path in paths.items()}
    run = storage_root() / "runs" / config.name
    run.mkdir(parents=True, exist_ok=True)
    with locked(run, say, wait):
        _keep(files, run / KEPT)
        write_text(run / "config.toml", dump_config(config))
        yield run


def kept_rewards(run: Path) -> dict[str, Path]:
    """The copies of the run's own rewards' files, by where below that folder they lie."""
    folder = run / KEPT
    files = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(folder).as_posix(): path for path in files}


def find_runs() -> dict[str, Path]:
    """The directories of all runs, by name."""
    return {path.parent.name: path.parent for path in (storage_root() / "runs").glob("*/config.toml")}


def find_run(name: str) -> Path:
    """The directory of an earlier run; UnknownRunError names the nearest ones there are."""
    folder, runs = storage_root() / "runs", find_runs()
    if name in runs:
        return runs[name]
    near = difflib.get_close_matches(name, runs, n=NAMES_SHOWN) or sorted(runs)[:NAMES_SHOWN]
    there = f"the nearest there: {', '.join(near)}" if near else "there is none yet"
    raise UnknownRunError(f"no run {name!r} in {folder} (GRPO_STORAGE says where); {there}")


@contextmanager
def locked(run: Path, say: Callable[[str], None] = print, wait: bool = False) -> Iterator[Path]:
    """Hold the run directory alone. While another process works in it, wait if `wait` is set, which `say` is told; else
    raise RunInUseError immediately.

    The kernel frees the lock when the holder and the processes that it supervises (`held_locks`) have ended, however
    they end. Where the holder has died, or this is a retry of its flow run, they are about to: even without `wait`,
    that is waited for, up to ENDING_SECONDS.
    """
    descriptor = os.open(run / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        _acquire(descriptor, run, say, wait)
        _locks.add(descriptor)
        os.truncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(_this_process()).encode(), 0)
        yield run
    finally:
        _locks.discard(descriptor)
        os.close(descriptor)  # unlocking it would take it from the supervised processes too


def held_locks() -> tuple[int, ...]:
    """File descriptors of the locks held by this process. A supervisor that inherits them keeps the run locked until
    what it supervises has ended, whatever became of this process."""
    return tuple(_locks)


@contextmanager
def model_lock(name: str) -> Iterator[None]:
    """Be the only one who moves a registered model's aliases, as soon as whoever does has ended. What is done under it
    takes seconds."""
    folder = storage_root() / "models"
    folder.mkdir(parents=True, exist_ok=True)
    # A model's name may have more bytes than a file system takes.
    with (folder / f"{name[:40]}-{hashlib.sha256(name.encode()).hexdigest()[:16]}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _keep(files: Mapping[str, bytes], folder: Path) -> None:
    if files == {place: path.read_bytes() for place, path in kept_rewards(folder.parent).items()}:
        return
    partial = folder.with_name(folder.name + ".partial")
    remove(partial)
    for place, content in files.items():
        (partial / place).parent.mkdir(parents=True, exist_ok=True)
        (partial / place).write_bytes(content)
    remove(folder)
    if files:
        publish(partial, folder)


def _acquire(descriptor: int, run: Path, say: Callable[[str], None], wait: bool) -> None:
    deadline = time.monotonic() + ENDING_SECONDS
    waiting = False
    while not _lock(descriptor):
        holder = _holder(descriptor)
        name = "process {pid} on {host} since {since}".format(**holder) if holder else "another process"
        if not wait and (not _is_ending(holder) or time.monotonic() > deadline):
            raise RunInUseError(
                f"run {run.name!r} is in use by {name} ({run}): two runs in one directory would overwrite each other. "
                "Wait until it has ended, cancel it, or give this one another name (--set name=...)"
            )
        if not waiting:
            patience = "until it is free" if wait else f"up to {ENDING_SECONDS:.0f} s for what that started to end"
            say(f"run {run.name!r} is in use by {name}: waiting {patience}")
            waiting = True
        time.sleep(POLL_SECONDS)


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _this_process() -> dict[str, Any]:
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "since": f"{datetime.now().astimezone():%Y-%m-%d %H:%M:%S %z}",
        "flow_run": os.environ.get("PREFECT__FLOW_RUN_ID"),  # set by Prefect for what it starts; the same at a retry
    }


def _holder(descriptor: int) -> dict[str, Any]:
    """Who wrote itself into the lock file; empty in the instant before it has."""
    try:
        return json.loads(os.pread(descriptor, 4096, 0))
    except ValueError:
        return {}


def _is_ending(holder: dict[str, Any]) -> bool:
    """The holder has died, or is an earlier attempt of this flow run: its process tree is on its way out."""
    this = _this_process()
    retried = holder and holder["flow_run"] is not None and holder["flow_run"] == this["flow_run"]
    return bool(retried or (holder and holder["host"] == this["host"] and not psutil.pid_exists(holder["pid"])))


def write_text(path: Path, text: str) -> None:
    """Write the file whole or not at all, whatever dies: the process or the machine."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text)
    publish(temporary, path)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if the file is missing or damaged."""
    try:
        found = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def set_aside(path: Path, key: str) -> None:
    """Move an output out of the way, to replaced/NAME-KEY, or NAME-KEY-2 and so on where that is taken."""
    if not path.exists():
        return
    folder = path.parent / "replaced"
    folder.mkdir(exist_ok=True)
    kept = f"{path.name}-{key[:12]}"
    names = itertools.chain([kept], (f"{kept}-{number}" for number in itertools.count(2)))
    path.rename(next(folder / name for name in names if not (folder / name).exists()))


def remove(path: Path) -> None:
    """Delete a file or a folder, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
