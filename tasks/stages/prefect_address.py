"""Addresses of Prefect's pages, and the error message if its server does not answer, or fails."""

from __future__ import annotations

import os
from pathlib import Path

from prefect.exceptions import PrefectHTTPStatusError
from prefect.settings import PREFECT_API_URL
from prefect.utilities.urls import url_for

from grpo_core.system.addresses import holds_secret
from tasks.stages.files import cannot_grow, has_room
from tasks.stages.mlflow_address import first_cause

HTTP_ERROR = PrefectHTTPStatusError.__mro__[2]  # of the HTTP client that this release of Prefect uses


def flow_run_page(flow_run_id: str) -> str:
    """Address of a flow run's page; "" if it is unknown, or contains a secret, as one of a worker's may."""
    address = url_for("flow-run", flow_run_id) or ""
    return "" if holds_secret(address) else address


def describe_server_failure(error: BaseException) -> str:
    """Describe what is wrong with Prefect's server if a request to it has failed, and what to do; "" for any other
    error."""
    cause: BaseException | None = error
    while cause is not None and not _is_of_server(cause):
        cause = cause.__cause__ or cause.__context__
    if cause is None:
        return ""
    url, status = PREFECT_API_URL.value(), 0
    if isinstance(cause, PrefectHTTPStatusError):
        status = cause.response.status_code
    if status == 401:
        return (
            f"the Prefect server at {url} asks for a password: set PREFECT_API_AUTH_STRING=USER:PASSWORD to the "
            "server's value"
        )
    if 0 < status < 500:
        return ""
    if full := full_database():
        return full
    said = f"answers with status {status}" if status else f"does not answer ({first_cause(cause)})"
    return f"Prefect's server at {url} {said}: see what it wrote, start it again, then run the same again"


def full_database() -> str:
    """Return a sentence if the disk of the database in $PREFECT_HOME, which the server of this machine uses, is full;
    "" otherwise."""
    database = Path(os.environ.get("PREFECT_HOME", "")) / "prefect.db"
    is_here = "://127.0.0.1:" in (PREFECT_API_URL.value() or "") and database.exists()
    return cannot_grow(database) if is_here and not has_room(database.parent) else ""


def _is_of_server(error: BaseException) -> bool:
    request = getattr(error, "_request", None)
    url = PREFECT_API_URL.value() or ""
    return isinstance(error, HTTP_ERROR) and request is not None and str(request.url).startswith(url)
