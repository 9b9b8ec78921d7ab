"""MLflow: where it keeps its data, and the one run that a pipeline run's stages write to."""

from __future__ import annotations

import os
import statistics
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import mlflow

from grpo_core.config import RunConfig
from grpo_core.forecast import Throughput
from tasks.storage import storage_root, write_text

RUN_ID_FILE = "mlflow_run_id"
EARLIER_RUNS = 5
SERVED_AT = "GRPO_MLFLOW_URL"  # where `grpo up` serves the SQLite file, in the environment of what it starts


def tracking_uri() -> str:
    """$MLFLOW_TRACKING_URI, else a SQLite file under the storage root. ValueError when it has a password in it, which
    links and receipts would show."""
    uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{storage_root() / 'mlflow' / 'mlflow.db'}"
    if (parts := urlsplit(uri)).password is not None:
        raise ValueError(
            f"MLFLOW_TRACKING_URI holds a password of {parts.hostname}, and the URI is shown in links: leave it "
            "out, and set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
        )
    return uri


def connect() -> mlflow.MlflowClient:
    """A client of the tracking store, which is made when it is not there."""
    (storage_root() / "mlflow").mkdir(parents=True, exist_ok=True)
    mlflow.set_tracking_uri(tracking_uri())
    return mlflow.MlflowClient()


def open_tracking_run(config: RunConfig, folder: Path) -> str:
    """Id of the MLflow run that belongs to the training in `folder`; a resumed training keeps the one it began with."""
    client = connect()
    id_file = folder / RUN_ID_FILE
    if id_file.exists():
        return id_file.read_text()
    experiment = client.get_experiment_by_name(config.registry.experiment)
    if experiment is None:
        experiment_id = client.create_experiment(config.registry.experiment, _artifact_location())
    else:
        experiment_id = experiment.experiment_id
    run_id = client.create_run(experiment_id, run_name=config.name).info.run_id
    for key, value in _flat(config.model_dump(mode="json", exclude_none=True)).items():
        client.log_param(run_id, key, value)
    write_text(id_file, run_id)
    return run_id


def earlier_throughput(config: RunConfig) -> Throughput | None:
    """The median pace of the last finished runs of the same base model; None where there is none."""
    client = connect()
    experiment = client.get_experiment_by_name(config.registry.experiment)
    if experiment is None:
        return None
    model = config.model.name_or_path.replace("'", "")
    runs = client.search_runs(
        [experiment.experiment_id],
        f"params.`model.name_or_path` = '{model}' and attributes.status = 'FINISHED'",
        order_by=["attributes.start_time DESC"],
        max_results=EARLIER_RUNS,
    )
    paces, lengths = [], []
    for run in runs:
        seconds = sum(metric.value for metric in client.get_metric_history(run.info.run_id, "step_time"))
        tokens = run.data.metrics.get("num_tokens")
        if seconds and tokens:
            paces.append(tokens / seconds / int(run.data.params["train.num_processes"]))
            lengths.append(run.data.metrics["completions/mean_length"])
    if not paces:
        return None
    return Throughput(
        statistics.median(paces),
        statistics.median(lengths),
        f"median of {len(paces)} earlier runs of this model in MLflow: {statistics.median(paces):,.0f} tokens/s a "
        f"process, completions of {statistics.median(lengths):.0f} tokens at their end",
    )


def training_run_id(training: Path) -> str:
    """Id of the MLflow run of a finished training."""
    return (training / RUN_ID_FILE).read_text()


def run_page(run_id: str) -> str:
    """Where a person finds the run, as Markdown; of a SQLite file, once `grpo up` serves it."""
    uri, experiment = tracking_uri(), connect().get_run(run_id).info.experiment_id
    served = uri.startswith(("http://", "https://"))
    page = f"{uri.rstrip('/') if served else os.environ.get(SERVED_AT, 'http://127.0.0.1:5000')}/#/experiments/{experiment}/runs/{run_id}"
    return f"[{page}]({page})" + ("" if served else " (while `grpo up` runs)")


def _artifact_location() -> str | None:
    """Beside the SQLite file; a tracking server decides for itself."""
    if tracking_uri().startswith("sqlite:"):
        return (storage_root() / "mlflow" / "artifacts").as_uri()
    return None


def _flat(values: Any, prefix: str = "") -> dict[str, Any]:
    items = values.items() if isinstance(values, dict) else enumerate(values)
    flat: dict[str, Any] = {}
    for key, value in items:
        name = f"{prefix}{key}"
        flat |= _flat(value, f"{name}.") if isinstance(value, (dict, list)) else {name: value}
    return flat
