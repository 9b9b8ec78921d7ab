from __future__ import annotations

import mlflow
import pytest


@pytest.fixture
def tracked(mlflow_client: mlflow.MlflowClient, request: pytest.FixtureRequest) -> dict[str, object]:
    """A run in an experiment of its own, as RUN_FILE describes it."""
    experiment = mlflow_client.create_experiment(request.node.name)
    info = mlflow_client.create_run(experiment).info
    return {"run_id": info.run_id, "experiment_id": experiment, "start_time": info.start_time}
