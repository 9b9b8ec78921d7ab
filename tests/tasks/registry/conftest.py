"""An MLflow database of a module of tests, and a model name for each test."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from mlflow import MlflowClient


@pytest.fixture(scope="module")
def mlflow(mlflow_client: MlflowClient) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(os.environ["GRPO_STORAGE"])  # artifacts of MLflow's default experiment are in the current folder
        # It sets the environment of all tests that come after.
        patch.setattr("flows.cli.promotion.configure", lambda: None)
        yield


@pytest.fixture
def model(request: pytest.FixtureRequest) -> str:
    return request.node.name.replace("/", "-")
