"""Removes what old runs take on the disk and in MLflow, unless something needs it.

Of a run that is removed, its directory, its weights and its traces go. Its figures, configuration and evaluation stay
in MLflow, and so do its versions with their tags: attempts are counted by them, and `grpo compare` reads them.
Checkpoints made of GGUF files go once no run that is left names them.

Versions are marked as removed before their weights are, and a folder is moved to TRASH before it is deleted: whatever
ends this, nothing half removed looks whole, and the next call removes the rest.
"""

from __future__ import annotations

import os
import re
import tempfile
import time
import tomllib
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from mlflow import MlflowClient
from mlflow.entities import LifecycleStage, LoggedModel, Run
from mlflow.entities.model_registry import ModelVersion
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository
from mlflow.utils.file_utils import local_file_uri_to_path

from grpo_core import run_files
from grpo_core.errors import GrpoError
from grpo_core.system.memory import gib_text
from tasks.registry.champion import REMOVED, model_lock, why_needed
from tasks.registry.lookup import if_there
from tasks.registry.model_version import LOGGED_MODEL
from tasks.stages.access import AccessError
from tasks.stages.base_model import BASES, ORIGIN
from tasks.stages.files import read_json, remove
from tasks.stages.locks import LOCK, RunInUseError, holding, lock, locked
from tasks.stages.mlflow_address import tracking_uri
from tasks.stages.run_directory import find_runs, storage_root
from tasks.stages.table import TRAIN
from tasks.tracking.runs import RUN_FILE, answering, connect

KEEP_DAYS = 30
SECONDS_PER_DAY = 86_400
TRASH = "trash"  # folder under the storage root
NAMED = re.compile(rf"(?:runs|{BASES})/([\w.-]+)")
TRACES_PER_REQUEST = 100
YOUNG = "it has changed since"
# What vLLM leaves on a machine when it is killed: shared memory, and sockets in the temporary folder.
SHARED_MEMORY = Path("/dev/shm")
SEGMENT = re.compile(r"psm_[0-9a-f]+|nccl-\w+|.*-cpushm-.*")
SOCKET = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


@dataclass(frozen=True)
class Item:
    """What is old enough to be removed: a run's directory, an output in its replaced/, a sweep's folder, a checkpoint
    made of a GGUF file, or what vLLM left on this machine.

    name: its path below the storage root. changed: in seconds since 1970. size: bytes on the disk, with those of its
    weights in MLflow if they are on this machine. kept: why it is not removed; "" if it is.
    """

    name: str
    changed: float
    size: int
    kept: str


@dataclass(frozen=True)
class RunFolder:
    """A run's directory, and what its configuration says: the sweep of which it is an arm ("" if of none, None if the
    configuration cannot be read), and the runs and bases whose files it names."""

    folder: Path
    sweep: str | None
    names: set[str]


def describe(item: Item, dry_run: bool) -> str:
    """One line about an item."""
    fate = "kept" if item.kept else "would be removed" if dry_run else "removed"
    why = f": {item.kept}" if item.kept else ""
    return f"{fate}  {item.name}, {gib_text(item.size / 2**30)}, last changed {date.fromtimestamp(item.changed)}{why}"


def summarize(items: list[Item], keep_days: float, dry_run: bool) -> str:
    """One sentence about all items."""
    going = [it for it in items if not it.kept]
    size, kept = gib_text(sum(it.size for it in going) / 2**30), len(items) - len(going)
    if not items:
        return f"nothing is older than {keep_days:g} days in {storage_root()}"
    would = "would be removed" if dry_run else "removed"
    return f"{len(going):,} {would}, {size}; {kept:,} of that age are needed"


def clean(keep_days: float, dry_run: bool, going_on: Collection[str]) -> Iterator[Item]:
    """Remove what has not changed for `keep_days` and nothing needs; yields what is of that age, each item when it is
    done. With `dry_run`, nothing is removed. `going_on`: runs and sweeps whose flow run has not ended.

    Needed are these, and others at work; runs of which a version has an alias, waits for approval, or would be champion
    again after a rollback; the arms of a sweep of which one is kept; and runs whose files the configuration of a kept
    run names. Raises TrackingError if MLflow does not answer, GrpoError if another call is at work.
    """
    if not keep_days >= 0:
        raise GrpoError(f"keep_days is {keep_days:g}: give 0 or more")
    root, now = storage_root(), time.time()
    before = now - keep_days * SECONDS_PER_DAY
    (trash := root / TRASH).mkdir(parents=True, exist_ok=True)
    with holding(descriptor := os.open(trash, os.O_RDONLY)), answering():
        if not lock(descriptor):
            raise GrpoError(f"another `grpo clean` works on {root}: wait until it has ended")
        client, sweeps = connect(), sorted(it.parent for it in (root / "sweeps").glob(f"*/{LOCK}"))
        if not dry_run:
            _empty(client, trash)  # what an earlier call that was ended has left
        going_on = {*going_on, *(sweep.name for sweep in sweeps if _under_lock(sweep, str))}
        runs = {name: _read(folder) for name, folder in sorted(find_runs().items())}
        kept = _kept(client, runs, before, going_on)
        read = {other for name in kept for other in runs[name].names}
        for name, run in runs.items():
            if _changed(run.folder) < before:
                yield (item := _handle(client, run.folder, run.folder, kept.get(name, ""), before, now, dry_run))
                kept |= {name: item.kept} if item.kept else {}
            for output in sorted(run.folder.glob("replaced/*")) if name in kept.keys() - read else ():
                if _changed(output) < before:
                    yield _handle(client, output, run.folder, "", before, now, dry_run)
        of_kept = {runs[name].sweep for name in kept}
        for sweep in sweeps:
            if _changed(sweep) < before and sweep.name not in going_on | of_kept:
                yield _handle(client, sweep, sweep, "", before, now, dry_run)
        (bases := root / BASES).mkdir(exist_ok=True)
        named = {other for name in kept for other in runs[name].names}
        with holding(descriptor := os.open(bases, os.O_RDONLY)):
            made = {*(it.parent for it in bases.glob(f"*/{ORIGIN}")), *bases.glob("*.partial")}
            for base in sorted(made) if lock(descriptor) else ():  # else a process makes one
                if _changed(base) < min(before, now - SECONDS_PER_DAY) and base.name not in named:
                    yield _handle(client, base, base, "", before, now, dry_run)
        if left := leftovers(min(before, now - SECONDS_PER_DAY)):  # a young one may be about to be used
            stats = [it.lstat() for it in left]
            size, changed = 512 * sum(it.st_blocks for it in stats), max(it.st_mtime for it in stats)
            yield Item(f"{len(left):,} files that killed vLLM engines left", changed, size, "")
            for path in () if dry_run else left:
                path.unlink(missing_ok=True)


def _read(folder: Path) -> RunFolder:
    text, sweep = "", None
    with suppress(OSError, ValueError, AttributeError):
        text = (folder / run_files.CONFIG).read_text(errors="replace")
        sweep = tomllib.loads(text).get("registry", {}).get("sweep", "")
    quoted = (str(Path(it).resolve()) for it in re.findall(r'"([^"\n]+)"', text))  # which may be links
    return RunFolder(folder, sweep, {name for it in (text, *quoted) for name in re.findall(NAMED, it)})


def _kept(
    client: MlflowClient, runs: Mapping[str, RunFolder], before: float, going_on: Collection[str]
) -> dict[str, str]:
    """Why each run is kept that is."""
    kept = {}
    for name, run in runs.items():
        if _changed(run.folder) >= before:
            kept[name] = YOUNG
        elif name in going_on or run.sweep in going_on:
            kept[name] = "its flow run, or that of its sweep, has not ended"
        elif run.sweep is None:
            kept[name] = f"its {run_files.CONFIG} cannot be read"
        elif run.folder.is_symlink():
            kept[name] = "it is a link to another folder"
        elif reason := _under_lock(run.folder, lambda run=run: _needed_in_mlflow(client, run.folder)):
            kept[name] = reason
    found = [*kept]
    while found:
        name = found.pop()
        for other in runs.keys() - kept.keys():
            if runs[name].sweep and runs[other].sweep == runs[name].sweep:
                kept[other] = f"{name}, of the same sweep, is kept"
            elif other in runs[name].names:
                kept[other] = f"{name} names its files"
            else:
                continue
            found.append(other)
    return kept


def _under_lock(folder: Path, why_kept: Callable[[], str]) -> str:
    """What the function gives under the lock of a run's or sweep's directory, or why there is no lock to be had."""
    try:
        with locked(folder):
            return why_kept()
    except RunInUseError:
        return "a process works on it"
    except (AccessError, OSError) as error:
        return str(error)


def _handle(client: MlflowClient, path: Path, run: Path, kept: str, before: float, now: float, dry_run: bool) -> Item:
    """Remove an item unless it is kept. `run`: the directory of the run or sweep that it is or belongs to; `now`: when
    the runs' configurations were read."""
    name, changed, size = path.relative_to(storage_root()).as_posix(), _changed(path), _size(client, path)
    kept = kept or _under_lock(run, lambda: _move(client, path, before, now, dry_run))
    if not kept and not dry_run:
        _empty(client, storage_root() / TRASH)
    return Item(name, changed, size, kept)


def _move(client: MlflowClient, path: Path, before: float, now: float, dry_run: bool) -> str:
    """Move an item to the trash unless it is needed now; returns why."""
    reason = YOUNG if _changed(path) >= before else _needed_in_mlflow(client, path)
    for other, folder in () if reason else find_runs().items():
        if (folder / run_files.CONFIG).stat().st_mtime >= now and path.name in _read(folder).names:
            return f"{other} names its files"
    if reason or dry_run:
        return reason
    (there := storage_root() / TRASH / uuid.uuid4().hex).mkdir()
    path.rename(there / path.name)
    return ""


def _empty(client: MlflowClient, trash: Path) -> None:
    try:
        for folder in trash.iterdir():
            for path in folder.iterdir():
                _delete(client, path)
            folder.rmdir()
    except OSError as error:
        raise GrpoError(f"{error.filename} cannot be removed: {error.strerror}; remove it as its owner") from error


def _delete(client: MlflowClient, path: Path) -> None:
    """Delete a run's directory or an output in the trash, and in MLflow its weights and traces."""
    for run_id, experiment_id in _tracked(path).items():
        if _mark(client, run_id, experiment_id):
            continue
        for model in _models(client, run_id, experiment_id):
            get_artifact_repository(model.artifact_location).delete_artifacts()
        where = {"locations": [experiment_id], "run_id": run_id, "include_spans": False}
        while traces := client.search_traces(max_results=TRACES_PER_REQUEST, **where):
            client.delete_traces(experiment_id, trace_ids=[trace.info.trace_id for trace in traces])
    remove(path)


def _mark(client: MlflowClient, run_id: str, experiment_id: str) -> str:
    """Mark the versions of an MLflow run as removed, unless one is needed; returns why."""
    if (run := _find_run(client, run_id)) is None:
        return "no such run"
    with ExitStack() as stack:
        for name in sorted({version.name for version in _versions(client, run_id, experiment_id)}):
            stack.enter_context(model_lock(name))
        versions = _versions(client, run_id, experiment_id)
        if reason := _first(why_needed(client, version) for version in versions):
            return reason
        today = date.today().isoformat()
        for version in versions:
            client.set_model_version_tag(version.name, str(version.version), REMOVED, today)
    if run.info.lifecycle_stage == LifecycleStage.ACTIVE:  # MLflow refuses tags of a run that is deleted there
        client.set_tag(run_id, REMOVED, today)
    return ""


def _needed_in_mlflow(client: MlflowClient, path: Path) -> str:
    """Why the weights of the trainings in a folder are needed; "" if they are not."""
    for run_id, experiment_id in _tracked(path).items():
        if _find_run(client, run_id) is None:
            return f"its MLflow run {run_id} is not at {tracking_uri()}, so who needs its weights is not known"
        if reason := _first(why_needed(client, version) for version in _versions(client, run_id, experiment_id)):
            return reason
    return ""


def _find_run(client: MlflowClient, run_id: str) -> Run | None:
    return if_there(lambda: client.get_run(run_id))


def _versions(client: MlflowClient, run_id: str, experiment_id: str) -> list[ModelVersion]:
    """Versions made of the weights of an MLflow run. Those that a person made may name only the weights."""
    weights = [run_id, *(model.model_id for model in _models(client, run_id, experiment_id))]
    wanted = [f"run_id = '{run_id}'", *(f"source_path LIKE '%{it}%'" for it in weights)]
    found = [version for its in wanted for version in client.search_model_versions(its)]
    return [*{(version.name, version.version): version for version in found}.values()]


def _models(client: MlflowClient, run_id: str, experiment_id: str) -> list[LoggedModel]:
    """The logged models of an MLflow run that hold its weights."""
    mine = f"source_run_id = '{run_id}' AND name = '{LOGGED_MODEL}'"
    return [*client.search_logged_models([experiment_id], mine)]


def _tracked(path: Path) -> dict[str, str]:
    """MLflow runs of the trainings in a run's directory, or of the training that the path is, with their
    experiments."""
    folders = [path, TRAIN.path(path), TRAIN.partial(path), *path.glob(f"replaced/{TRAIN.output}*")]
    known = [read_json(it / RUN_FILE) for it in folders if it.is_dir()]
    return {it["run_id"]: it["experiment_id"] for it in known if it}


def _changed(path: Path) -> float:
    """Time at which a file, or what is up to two levels below a folder, last changed, in seconds since 1970. The lock
    does not count, since each look takes it."""
    try:
        times = [it.lstat().st_mtime for it in [*path.glob("*"), *path.glob("*/*")] if it.name != LOCK]
        return max(times, default=path.lstat().st_mtime)
    except FileNotFoundError:  # a process is renaming files
        return time.time()


def _size(client: MlflowClient, path: Path) -> int:
    """Bytes on the disk, with those of its weights in MLflow if they are on this machine; what has two names counts
    once."""
    sizes: dict[int, int] = {}
    with suppress(OSError):  # a process is renaming files, or they are closed to this user
        models = [model for known in _tracked(path).items() for model in _models(client, *known)]
        places = [it.artifact_location for it in models if it.artifact_location.startswith(("file:", "/"))]
        folders = [path, *(Path(local_file_uri_to_path(it)) for it in places)]
        for file in (it for folder in folders if folder.exists() for it in (folder, *folder.rglob("*"))):
            sizes |= {(stat := file.lstat()).st_ino: 512 * stat.st_blocks}
    return sum(sizes.values())


def _first(reasons: Iterator[str]) -> str:
    """The first that is not empty, or ""."""
    return next(filter(None, reasons), "")


def leftovers(before: float) -> list[Path]:
    """Segments of shared memory and sockets of this user that have not changed since `before`, in seconds since 1970,
    and that no process of this machine uses."""
    segments = [it for it in SHARED_MEMORY.glob("*") if SEGMENT.fullmatch(it.name)]
    sockets = [it for it in Path(tempfile.gettempdir()).iterdir() if SOCKET.fullmatch(it.name) and it.is_socket()]
    old = []
    for path in [*segments, *sockets]:
        with suppress(FileNotFoundError):
            if (stat := path.stat()).st_uid == os.getuid() and stat.st_mtime < before:
                old.append(path)
    used = _used() if old else ""
    return [path for path in old if f"{path}\n" not in used]


def _used() -> str:
    """Paths that processes have mapped and sockets that they have open, each at the end of a line."""
    texts = [Path("/proc/net/unix").read_text()]
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):  # it has ended, or is another user's, who cannot use files of this one
            texts.append(maps.read_text())
    return "".join(texts)
