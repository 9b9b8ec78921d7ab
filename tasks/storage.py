"""The storage root and the run directory, the contract between stages.

    STORAGE/runs/NAME/     config.toml, dataset/, plan.json, training/, evaluation/, registration.json
    STORAGE/mlflow/        mlflow.db, artifacts/      (unless MLFLOW_TRACKING_URI is set)
    STORAGE/prefect/       Prefect's home             (unless PREFECT_HOME is set)

An output is written under a temporary name and renamed; what it replaces is kept under NAME/replaced/.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from grpo_core.config import RunConfig, dump_config


def storage_root() -> Path:
    """The folder that all stages share: $GRPO_STORAGE, else ./storage."""
    return Path(os.environ.get("GRPO_STORAGE", "storage")).resolve()


def open_run(config: RunConfig) -> Path:
    """The run's directory, with its resolved configuration written."""
    run = storage_root() / "runs" / config.name
    run.mkdir(parents=True, exist_ok=True)
    write_text(run / "config.toml", dump_config(config))
    return run


def write_text(path: Path, text: str) -> None:
    """Write the file whole or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text)
    temporary.rename(path)


def set_aside(path: Path, key: str) -> None:
    """Move an output of another lineage out of the way, to replaced/NAME-KEY."""
    if not path.exists():
        return
    kept = path.parent / "replaced" / f"{path.name}-{key[:12]}"
    kept.parent.mkdir(exist_ok=True)
    remove(kept)
    path.rename(kept)


def remove(path: Path) -> None:
    """Delete a file or a folder, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
