"""Every test of the stages works in a folder whose name is a pattern: a library that takes a path for a pattern finds
other files, or none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from mlflow import MlflowClient, set_tracking_uri


@pytest.fixture
def tmp_path(tmp_path: Path) -> Path:
    (folder := tmp_path / "[a] *").mkdir()
    return folder


@pytest.fixture(scope="module")
def mlflow_client(
    tmp_path_factory: pytest.TempPathFactory, embed_mlflow: Callable[[Path], None]
) -> Iterator[MlflowClient]:
    """An embedded MLflow, in a storage root of its own."""
    from tasks.tracking.runs import connect

    storage = tmp_path_factory.mktemp("storage")
    embed_mlflow(storage)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRPO_STORAGE", str(storage))
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        yield connect()
    set_tracking_uri(None)
