"""Reads the record of a finished run from its directory or, for a run on another machine, from MLflow."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mlflow
import polars as pl

from grpo_core import run_files
from grpo_core.config.run import RunConfig
from grpo_core.data.images import ImageFiles, beside
from grpo_core.errors import GrpoError
from grpo_core.system.tables import read_parquet
from tasks.data.completions import recorded_batches
from tasks.registry.judging import RECORD
from tasks.rendering.drawing import Row
from tasks.rendering.figures import metric_of
from tasks.reports.cost import Cost, cost_of
from tasks.stages.run_directory import UnknownRunError, find_run, read_config
from tasks.stages.table import ALL_STAGES, EVALUATE, PLAN, PROBE, STAGES, TRAIN, VALIDATE, WARM_START
from tasks.tracking.runs import HARDWARE, RUN_FILE, connect

LOGGED = {  # by register, at the top of the MLflow run
    run_files.CONFIG, run_files.PLAN, run_files.RESULT, run_files.METRICS, run_files.EVALUATION, run_files.DATASET,
}  # fmt: skip
TRACKED = re.compile(r"[0-9a-f]{32}|.+@.+|.+/\d+")  # an MLflow run id, MODEL@ALIAS, MODEL/VERSION


class NotEvaluatedError(GrpoError):
    """Raised for a run without an evaluation; the message says how to make one."""


@dataclass(frozen=True)
class Record:
    """Record of a run. `data`, `plan`, `result`, `evaluation`, `probe`: receipts of validate, plan, train, evaluate and
    probe; empty if the stage is not part of the run. `seconds`: of each stage that is done. `metrics`: one row per
    update. `findings`: of the health policy. `batches`: completions of the first and the last generation batch, if they
    exist. `samples`: of the evaluation. `hardware`: where the run was trained, "" if unknown. `images`: those of the
    prompts; None if they have none, or are on another machine."""

    config: RunConfig
    data: dict[str, Any]
    plan: dict[str, Any]
    result: dict[str, Any]
    evaluation: dict[str, Any]
    seconds: dict[str, float]
    metrics: list[Row]
    findings: list[dict[str, Any]]
    batches: list[pl.DataFrame]
    samples: pl.DataFrame
    hardware: str = ""
    probe: dict[str, Any] = field(default_factory=dict)
    images: ImageFiles | None = None

    @property
    def metric(self) -> str:
        """Metric by which policies are compared: accuracy or reward."""
        return metric_of(self.config, self.evaluation)

    @property
    def cost(self) -> Cost:
        others = (self.seconds.get(stage.name, 0.0) for stage in (PROBE, WARM_START))
        return cost_of(self.config, self.hardware, self.result, self.evaluation.get("seconds", 0.0), *others)


def load_record(reference: str) -> Record:
    """Load the record of a run under the storage root, by its name; else by an MLflow run id, MODEL@ALIAS or
    MODEL/VERSION.

    Raises UnknownRunError if there is no such run, NotEvaluatedError if it has not been evaluated.
    """
    try:
        run = find_run(reference)
    except UnknownRunError as error:
        if not TRACKED.fullmatch(reference):
            raise
        tracked = _tracked(reference)
        if tracked is None:
            raise UnknownRunError(f"{error}; nor does MLflow have such a run or model version") from None
        return _download(reference, *tracked)
    return read_record(run)


def read_record(
    run: Path, config: RunConfig | None = None, training: Path | None = None, evaluation: Path | None = None
) -> Record:
    """Read the record in a run's directory. `config`: the run's, if it is already parsed; `training`, `evaluation`:
    paths of those outputs, if elsewhere. Raises NotEvaluatedError if there is no evaluation."""
    training, evaluation = training or TRAIN.path(run), evaluation or EVALUATE.path(run)
    if not (evaluation / EVALUATE.receipt).is_file():
        if missing := [stage.name for stage in STAGES[: STAGES.index(EVALUATE)] if not stage.read_receipt(run)]:
            what = f"its {', '.join(missing)} {'has' if len(missing) == 1 else 'have'} not been done"
            raise NotEvaluatedError(
                f"run {run.name!r} has no evaluation: {what}. `grpo status {run.name}` says more; to go on: "
                f"grpo run {run / run_files.CONFIG}"
            )
        raise NotEvaluatedError(
            f"run {run.name!r} has no evaluation ({evaluation}); make it: grpo stage evaluate --run {run.name}"
        )
    config = config or read_config(run)
    receipts = {stage: _json(stage.receipt_path(run)) for stage in ALL_STAGES}
    receipts |= {stage: _json(folder / stage.receipt) for stage, folder in [(TRAIN, training), (EVALUATE, evaluation)]}
    recorded = recorded_batches(training)
    return Record(
        config=config,
        data=receipts[VALIDATE],
        plan=receipts[PLAN],
        result=receipts[TRAIN],
        evaluation=receipts[EVALUATE],
        seconds={stage.name: receipt["seconds"] for stage, receipt in receipts.items() if "seconds" in receipt},
        metrics=_lines(training / run_files.METRICS),
        findings=_lines(training / run_files.FINDINGS),
        batches=[read_parquet(path) for path in dict.fromkeys([*recorded[:1], *recorded[-1:]])],
        samples=read_parquet(evaluation / run_files.SAMPLES),
        hardware=_json(training / RUN_FILE).get(HARDWARE, ""),
        probe=receipts[PROBE] if PROBE.is_asked(config) else {},
        images=beside(run_files.prompts(run, "eval")),
    )


def _tracked(reference: str) -> tuple[str, str | None] | None:
    """Find the MLflow run of this name, and for a model version the folder there with its record; None if there is
    none."""
    client = connect()
    name, at, alias = reference.partition("@")
    model, slash, version = reference.rpartition("/")
    try:
        if at:
            found = client.get_model_version_by_alias(name, alias)
        elif slash:
            found = client.get_model_version(model, version)
        else:
            return client.get_run(reference).info.run_id, None
        return (found.run_id, found.tags.get(RECORD)) if found.run_id else None
    except mlflow.MlflowException:
        return None


def _download(reference: str, run_id: str, record: str | None) -> Record:
    """Download the record that register logged to the MLflow run, in which the training's files are at the top.
    `record`: folder with the configuration and evaluation of one of its versions; None: those of the latest."""
    with tempfile.TemporaryDirectory() as folder:
        there = {artifact.path for artifact in mlflow.artifacts.list_artifacts(run_id=run_id)}
        for path in LOGGED & there:
            mlflow.artifacts.download_artifacts(run_id=run_id, artifact_path=path, dst_path=folder)
        if not {run_files.CONFIG, run_files.EVALUATION} <= there:
            raise NotEvaluatedError(f"MLflow run {run_id} ({reference}) has no evaluation: it was not registered")
        if record:
            own = mlflow.artifacts.download_artifacts(run_id=run_id, artifact_path=record, dst_path=folder)
            shutil.copytree(own, folder, dirs_exist_ok=True)
        hardware = mlflow.MlflowClient().get_run(run_id).data.tags.get(HARDWARE, "")
        return replace(read_record(Path(folder), training=Path(folder)), hardware=hardware)


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.is_file() else {}


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
