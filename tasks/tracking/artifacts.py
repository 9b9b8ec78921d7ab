"""Artifacts of stages in Prefect. All that they show is in the run directory or in MLflow too, so one that cannot be
written fails no stage: the log says it once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prefect import get_run_logger
from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

RETRIES = 1  # of a request; by default Prefect's client tries for a minute, which each artifact of a stage would take


def show_markdown(key: str, markdown: str, description: str) -> None:
    """Write a page for the task run under way, or say in the log why it is not written."""
    show_or_say(key, lambda: create_markdown_artifact(markdown, key=key, description=description))


def show_table(key: str, table: list[dict[str, Any]], description: str) -> None:
    """Write a table for the task run under way, or say in the log why it is not written."""
    show_or_say(key, lambda: create_table_artifact(table, key=key, description=description))


def show_or_say(key: str, write: Callable[[], object], said: bool = False) -> bool:
    """Call `write`, with few retries. Returns whether it went well; if not, the log says why unless that is `said`."""
    try:
        with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: RETRIES}):
            write()
    except Exception as error:  # of which type depends on the HTTP client that this release of Prefect uses
        if not said:
            get_run_logger().warning("the artifact %s could not be written, which changes no result: %r", key, error)
        return False
    return True
