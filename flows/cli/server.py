"""Which Prefect server a command works with."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from flows.serving.local_server import find_api, prefect_api


@contextmanager
def prefect_server() -> Iterator[str]:
    """The URL of Prefect's API, as `prefect_api` gives it: import in the body what is needed, while a server starts.
    After the body, the server has the limit of one training at a time. Raises ServerError if there is no server."""
    with prefect_api() as url:
        yield url
    from flows.serving.server_setup import ensure_training_limit, password_asked_for

    with password_asked_for():
        ensure_training_limit()


def use_running_server() -> bool:
    """Whether a Prefect server runs for this storage. If so, what follows is recorded there as a flow run, triggers its
    automations, and logs only there. Raises ServerError if the server wants a password."""
    if (api := find_api()) is None:
        return False
    os.environ["PREFECT_API_URL"] = api
    os.environ["PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL"] = "CRITICAL"
    from flows.serving.server_setup import check_access

    check_access()
    return True
