"""The address of MLflow, and the error message if it does not answer, or fails."""

from __future__ import annotations

import os
import re
from pathlib import Path

from grpo_core.errors import GrpoError
from grpo_core.system.addresses import holds_secret
from tasks.stages.files import cannot_grow, is_full
from tasks.stages.run_directory import storage_root

REPEATED = re.compile(r"too many \d+ error responses")  # urllib3, after the last try


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


def tracking_errors() -> tuple[type[Exception], ...]:
    """Exceptions of MLflow, and of the database that it may write to itself, which it does not convert."""
    from alembic.util.exc import CommandError
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    return MlflowException, SQLAlchemyError, CommandError


def describe(error: Exception) -> str:
    """Describe what is wrong with MLflow or its database (`tracking_errors`), and what to do."""
    from mlflow.exceptions import MlflowException, RestException

    if is_full(error):
        return first_cause(error)
    if isinstance(error, MlflowException) and 400 <= error.get_http_status_code() < 500:
        deleted = "must be in the 'active' state" in str(error)
        remedy = ". Restore it in MLflow, or train again with --force, which makes another run" if deleted else ""
        return f"MLflow at {tracking_uri()} refuses the request: {error}{remedy}"
    if is_served() and (isinstance(error, RestException) or REPEATED.search(str(error))):
        said = str(error).partition("\n")[0]
        return (
            f"MLflow at {tracking_uri()} answers with an error ({said}): see what it wrote, and whether it reaches its "
            "database and the storage of its artifacts, then run the same again"
        )
    cause = first_cause(error)
    if is_served():
        return _does_not_answer(cause)
    return (
        f"MLflow's database {tracking_uri()} cannot be used ({cause}): see that it runs and that you may write to it. "
        "If another version of MLflow made it, or it is damaged, restore its backup"
    )


def refuse_unreachable_server() -> None:
    """Raises TrackingError if MLflow is a server that does not answer. For the beginning of a run, which would find
    that out only before its training."""
    if not is_served():
        return
    import httpx2

    try:  # any status is an answer, with whichever certificate: MLflow's client reports the rest
        httpx2.get(f"{tracking_uri().rstrip('/')}/health", timeout=10, verify=False)
    except httpx2.TransportError as error:
        raise TrackingError(_does_not_answer(first_cause(error))) from error


def is_served() -> bool:
    """True if MLflow is a server, rather than a database that this process writes to."""
    return tracking_uri().startswith(("http://", "https://"))


def _does_not_answer(cause: str) -> str:
    return (
        f"MLflow at {tracking_uri()} does not answer ({cause}): start the server, then run the same again; without "
        "MLFLOW_TRACKING_URI, runs are kept in a SQLite file under the storage root"
    )


def first_cause(error: BaseException) -> str:
    """Return the operating system's message if there is one, which MLflow's client wraps several times; else the
    first line of the database's or the error's own, or a sentence if it says that the database's disk is full."""
    if is_full(error):
        if file := database_file():
            return cannot_grow(file)
        return f"the disk of the database of MLflow at {tracking_uri()} is full: make room there, then run again"
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    return str(getattr(error, "orig", error)).partition("\n")[0]
