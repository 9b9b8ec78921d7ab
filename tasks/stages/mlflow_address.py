"""The address of MLflow, and the error message if it does not answer."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_core.errors import GrpoError
from grpo_core.system.addresses import holds_secret
from tasks.stages.files import cannot_grow, is_full
from tasks.stages.run_directory import storage_root

if TYPE_CHECKING:
    from mlflow.exceptions import MlflowException


class TrackingError(GrpoError):
    """Raised if MLflow cannot be used: its address is wrong, it does not answer, or it refuses; the message says
    which."""


def tracking_uri() -> str:
    """Return $MLFLOW_TRACKING_URI, or the address of a SQLite file under the storage root.

    Raises TrackingError if the URI contains a secret: links and receipts would show it.
    """
    uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{storage_root() / 'mlflow' / 'mlflow.db'}"
    if holds_secret(uri):
        raise TrackingError(
            "MLFLOW_TRACKING_URI contains a user, password or token, and links show the URI: leave it out, and set "
            "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN (for PostgreSQL: "
            "PGPASSWORD)"
        )
    return uri


def database_file() -> Path | None:
    """Return the SQLite file in which MLflow keeps everything; None if a server does."""
    scheme, _, path = tracking_uri().partition(":///")
    return Path(path) if scheme == "sqlite" else None


def describe(error: MlflowException) -> str:
    """Describe what is wrong with MLflow, and what to do."""
    if is_full(error):
        return first_cause(error)
    if 400 <= error.get_http_status_code() < 500:
        return f"MLflow at {tracking_uri()} refuses the request: {error}"
    return (
        f"MLflow at {tracking_uri()} does not answer ({first_cause(error)}): start the server, then run the same "
        "again; without MLFLOW_TRACKING_URI, runs are kept in a SQLite file under the storage root"
    )


def first_cause(error: BaseException) -> str:
    """Return the operating system's message if there is one, which MLflow's client wraps several times; else the
    error's own, or a sentence if it says that the database's disk is full."""
    if is_full(error):
        if file := database_file():
            return cannot_grow(file)
        return f"the disk of the database of MLflow at {tracking_uri()} is full: make room there, then run again"
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    return str(error)
