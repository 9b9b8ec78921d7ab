"""The storage root and the run directory, the contract between stages.

    STORAGE/runs/NAME/     config.toml, rewards/ (copies of its own modules), dataset/, plan.json, training/,
                           evaluation/, registration.json, errors.log, .lock
    STORAGE/sweeps/NAME/   files of a sweep that belong to no single arm
    STORAGE/mlflow/        mlflow.db, artifacts/      (unless MLFLOW_TRACKING_URI is set)
    STORAGE/models/        the lock of each registered model
    STORAGE/bases/         checkpoints made of GGUF files
    STORAGE/pace/          measured paces of this machine
    STORAGE/prefect/       Prefect's home             (unless PREFECT_HOME is set)
    STORAGE/up.json        the `grpo up` that serves all this, locked while it runs

An output is written under a temporary name, flushed to the disk and renamed; the output that it replaces is kept under
NAME/replaced/. A process that writes into a run's directory holds its lock.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from grpo_core import run_files
from grpo_core.config.files import KEPT, dump_config, load_config, parse_config, read_values
from grpo_core.config.functions import own_name
from grpo_core.config.run import RunConfig
from grpo_core.data import own_code
from grpo_core.environments.registry import file_of, named
from grpo_core.errors import ConfigError, GrpoError
from grpo_core.rewards.contract import files_of
from grpo_core.system.files import publish
from grpo_core.system.own_code import place_of
from tasks.stages.access import check_access
from tasks.stages.files import remove, write_text
from tasks.stages.locks import locked

NAMES_SHOWN = 5


class UnknownRunError(GrpoError):
    """Raised if a run is not under the storage root; the message says where it was searched and which runs exist."""


def storage_root() -> Path:
    """Folder that all stages share: $GRPO_STORAGE, else ./storage."""
    return Path(os.environ.get("GRPO_STORAGE", "storage")).resolve()


def run_folder(name: str) -> Path:
    """Directory of the run of this name, even if it does not exist."""
    return storage_root() / "runs" / name


def read_config(run: Path) -> RunConfig:
    """Read the run's configuration. Call this under the run's lock, then pass the result on: another `grpo run` may
    replace it.

    Raises ConfigError if it is not valid, as after a change of version.
    """
    return load_config(run / run_files.CONFIG)


def read_former_config(run: Path) -> RunConfig:
    """Read the configuration of another run than this process works on, without making its own modules importable: they
    would take the place of this run's. Raises ConfigError, which names the file."""
    values = read_values(run / run_files.CONFIG)
    try:
        return parse_config(values)
    except ConfigError as error:
        raise ConfigError(f"{run / run_files.CONFIG} is not valid: {error}") from error


@contextmanager
def open_run(config: RunConfig, say: Callable[[str], None] = print, wait: bool = False) -> Iterator[Path]:
    """Lock the run's directory as `locked` does, and write its resolved configuration and copies of the files of its
    own rewards, tools, environments and columns. Raises RewardError, EnvironmentsError or ConfigError if one cannot be
    imported."""
    own = [reward for reward in config.rewards if ":" in reward.function]
    paths = {place_of(Path(file), own_name(reward.function)): Path(file) for reward in own for file in files_of(reward)}
    paths |= {place_of(Path(file), name): Path(file) for file, name in own_code.files(config.data).items()}
    paths |= {place_of(file_of(name), name): file_of(name) for name in named(config.environment) if ":" in name}
    files = {place: path.read_bytes() for place, path in paths.items()}
    run = run_folder(config.name)
    run.mkdir(parents=True, exist_ok=True)
    with locked(run, say, wait):
        _keep(files, run / KEPT)
        write_text(run / run_files.CONFIG, dump_config(config))
        yield run


def kept_rewards(run: Path) -> dict[str, Path]:
    """Copies of the files of the run's own rewards, by their path below the folder of the copies."""
    folder = run / KEPT
    files = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(folder).as_posix(): path for path in files}


def find_runs() -> dict[str, Path]:
    """Directories of all runs, by name. Raises AccessError if this user may not read the storage."""
    check_access(root := storage_root(), folder := root / "runs", write=False)
    return {path.parent.name: path.parent for path in folder.glob(f"*/{run_files.CONFIG}")}


def find_run(name: str) -> Path:
    """Return the directory of an earlier run. Raises UnknownRunError, which names the nearest runs, if there is
    none."""
    folder, runs = storage_root() / "runs", find_runs()
    if name in runs:
        return runs[name]
    near = difflib.get_close_matches(name, runs, n=NAMES_SHOWN) or sorted(runs)[:NAMES_SHOWN]
    there = f"the nearest there: {', '.join(near)}" if near else "there is none yet"
    raise UnknownRunError(f"no run {name!r} in {folder} (GRPO_STORAGE says where); {there}")


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
