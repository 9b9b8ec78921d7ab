"""Look up what MLflow may not have."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from mlflow import MlflowClient
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException

NOT_THERE = ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE")  # the latter for a name that no model can have
T = TypeVar("T")


def find_version(client: MlflowClient, name: str, number: str) -> ModelVersion | None:
    """Return a version of a registered model; None if it does not exist."""
    return if_there(lambda: client.get_model_version(name, number))


def if_there(ask: Callable[[], T]) -> T | None:
    """Return the registry's answer; None if it says that the object does not exist. Other errors are raised."""
    try:
        return ask()
    except MlflowException as error:
        if error.error_code not in NOT_THERE:
            raise
        return None
