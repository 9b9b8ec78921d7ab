"""An embedded MLflow for the tests of tracking."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import mlflow
import pytest

from tasks.tracking.runs import connect


@pytest.fixture(scope="module")
def mlflow_client(
    tmp_path_factory: pytest.TempPathFactory, embed_mlflow: Callable[[Path], None]
) -> Iterator[mlflow.MlflowClient]:
    storage = tmp_path_factory.mktemp("storage")
    embed_mlflow(storage)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRPO_STORAGE", str(storage))
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        yield connect()
    mlflow.set_tracking_uri(None)


@pytest.fixture
def tracked(mlflow_client: mlflow.MlflowClient, request: pytest.FixtureRequest) -> dict[str, object]:
    """A run in an experiment of its own, as RUN_FILE describes it."""
    experiment = mlflow_client.create_experiment(request.node.name)
    info = mlflow_client.create_run(experiment).info
    return {"run_id": info.run_id, "experiment_id": experiment, "start_time": info.start_time}
