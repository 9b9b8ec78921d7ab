"""An MLflow database of a module of tests, and a model name for each test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from mlflow import set_tracking_uri


@pytest.fixture(scope="module")
def mlflow(tmp_path_factory: pytest.TempPathFactory, embed_mlflow: Callable[[Path], None]) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("storage")
    embed_mlflow(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRPO_STORAGE", str(folder))
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        patch.chdir(folder)  # artifacts of MLflow's default experiment are in the current folder
        patch.setattr(
            "flows.cli.promotion.configure", lambda: None
        )  # it sets the environment of all tests that come after
        yield
    set_tracking_uri(None)


@pytest.fixture
def model(request: pytest.FixtureRequest) -> str:
    return request.node.name.replace("/", "-")
