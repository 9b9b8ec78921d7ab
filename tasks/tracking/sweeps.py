"""The MLflow run of a sweep, under which MLflow shows the runs of its arms."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import mlflow
from mlflow.exceptions import MlflowException
from mlflow.utils.mlflow_tags import MLFLOW_RUN_NOTE, MLFLOW_SOURCE_NAME, MLFLOW_SOURCE_TYPE

from tasks.stages.arms import sweep_folder
from tasks.stages.files import read_json, write_text
from tasks.tracking.runs import (
    RUN_FILE,
    answering,
    brief_requests,
    connect,
    flow_run_link,
    flow_run_tag,
    open_experiment,
)
from tasks.tracking.view import RESULT, SWEEP


def open_sweep_run(sweep: str, experiment: str) -> str:
    """Set the sweep's MLflow run to running and return its id; make the run if there is none, or if MLflow has lost it.
    Raises TrackingError if MLflow does not answer."""
    file = sweep_folder(sweep) / RUN_FILE
    with answering():
        client = connect()
        run_id = read_json(file).get("run_id")
        if run_id and _is_there(client, run_id):
            client.update_run(run_id, status="RUNNING")
            return run_id
        experiment_id = open_experiment(client, experiment)
        tags = {
            MLFLOW_RUN_NOTE: f"A sweep; nothing is chosen yet. {flow_run_link()}",
            MLFLOW_SOURCE_NAME: "grpo-flows",
            MLFLOW_SOURCE_TYPE: "LOCAL",
            SWEEP: sweep,
            **flow_run_tag(),
        }
        info = client.create_run(experiment_id, run_name=sweep, tags=tags).info
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, json.dumps({"run_id": info.run_id, "experiment_id": experiment_id}) + "\n")
    return info.run_id


def _is_there(client: mlflow.MlflowClient, run_id: str) -> bool:
    try:
        return client.get_run(run_id).info.lifecycle_stage == "active"
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return False


def log_choice(sweep: str, note: str, result: str, metrics: Mapping[str, float], files: Mapping[str, Path]) -> None:
    """Log the sweep's result to its MLflow run, and end the run. `files`: artifact folder → file."""
    client, run_id = connect(), read_json(sweep_folder(sweep) / RUN_FILE)["run_id"]
    with answering():
        client.set_tag(run_id, MLFLOW_RUN_NOTE, f"{note} {flow_run_link()}")
        client.set_tag(run_id, RESULT, result)
        for name, value in metrics.items():
            client.log_metric(run_id, name, value)
        for folder, file in files.items():
            client.log_artifact(run_id, str(file), folder)
        client.set_terminated(run_id)


def end_sweep_run(sweep: str, status: str) -> None:
    """End the sweep's MLflow run, if MLflow answers within seconds; errors are ignored, since what ended the sweep
    matters more."""
    with suppress(MlflowException), brief_requests():
        connect().set_terminated(read_json(sweep_folder(sweep) / RUN_FILE)["run_id"], status)
