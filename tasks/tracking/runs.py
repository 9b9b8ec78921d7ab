"""MLflow: the client, and the single MLflow run to which all stages of a pipeline run write."""

from __future__ import annotations

import getpass
import json
import logging
import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote

import mlflow
from mlflow.entities import Dataset, DatasetInput, InputTag, Param
from mlflow.exceptions import MlflowException
from mlflow.utils.mlflow_tags import (
    MLFLOW_DATASET_CONTEXT,
    MLFLOW_GIT_COMMIT,
    MLFLOW_GIT_DIRTY,
    MLFLOW_PARENT_RUN_ID,
    MLFLOW_RUN_NOTE,
    MLFLOW_SOURCE_NAME,
    MLFLOW_SOURCE_TYPE,
    MLFLOW_USER,
)

from grpo_core import run_files
from grpo_core.config.base import flatten
from grpo_core.config.files import KEPT
from grpo_core.config.run import RunConfig
from grpo_core.fingerprint import content_hash
from grpo_core.planning.hardware import find_gpu, name_hardware
from grpo_core.system.processes import importing
from tasks.data.path_or_hub import data_set
from tasks.data.sources import Source, sources_of
from tasks.rendering.markdown import escape
from tasks.stages.arms import arm_prefix, sweep_folder
from tasks.stages.errors import StageError
from tasks.stages.files import read_json, write_text
from tasks.stages.lineage import DIGITS, lineage_keys
from tasks.stages.mlflow_address import TrackingError, database_file, describe, is_served, tracking_errors, tracking_uri
from tasks.stages.run_directory import kept_rewards, storage_root
from tasks.stages.table import PLAN, VALIDATE
from tasks.tracking.database import make_database
from tasks.tracking.view import SWEEP, VIEW, experiment_tags

RUN_FILE = "mlflow.json"  # in a training's folder: run_id, experiment_id, start_time (ms), hardware of its MLflow run
PARAMS_PER_REQUEST = 100  # MLflow's maximum
REQUEST_LIMITS = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "10", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}  # seconds; retries
FOREIGN_TABLES = [
    ("environment", "environment_factory"),
    ("environment", "environment_args"),
    ("data", "chat_template_kwargs"),
    ("data", "columns"),
]
HARDWARE, FLOW_RUN = "hardware", "prefect.flow_run"  # tags of a run
LINEAGE = "lineage.txt"  # among its artifacts
TRAINING_MODE = "?workflowType=machine_learning"  # of MLflow's pages; by default they are for LLM applications
SERVED_AT = "GRPO_MLFLOW_URL"  # variable: address at which `grpo up` serves the SQLite file, set for its children

# These log every attempt to reach a server that is down, and a missing GPU: no action is needed. The last one also logs
# each error that it raises.
for library in ("urllib3.connectionpool", "mlflow.system_metrics.system_metrics_monitor"):
    logging.getLogger(library).setLevel(logging.ERROR)
logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)


def connect() -> mlflow.MlflowClient:
    """Return a client of the tracking store, which is created if it does not exist. Raises TrackingError as
    `tracking_uri` does, and if the disk is full."""
    (storage_root() / "mlflow").mkdir(parents=True, exist_ok=True)
    named = "MLFLOW_TRACKING_URI" in os.environ
    mlflow.set_tracking_uri(tracking_uri())
    if not named:  # MLflow sets the variable, which would then apply to other storage roots too
        os.environ.pop("MLFLOW_TRACKING_URI", None)
    with importing():  # the store, with all that it stands on
        if file := database_file():
            make_database(file)
        return mlflow.MlflowClient()


@contextmanager
def brief_requests() -> Iterator[None]:
    """Give up within seconds if a server does not answer; by default, MLflow tries for a quarter of an hour. Variables
    that the environment sets are kept."""
    mine = {name: value for name, value in REQUEST_LIMITS.items() if name not in os.environ}
    os.environ.update(mine)
    try:
        yield
    finally:
        for name in mine:
            del os.environ[name]


@contextmanager
def answering() -> Iterator[None]:
    """Raises TrackingError within seconds if MLflow refuses a request of the body or does not answer, or if its
    database cannot be used."""
    try:
        with brief_requests():
            yield
    except tracking_errors() as error:
        raise TrackingError(describe(error)) from error


def open_tracking_run(config: RunConfig, run: Path, folder: Path) -> dict[str, Any]:
    """Return the MLflow run of the training in `folder`, as RUN_FILE describes it. If there is none, make it, with
    parameters, data and plan; a resumed training keeps its run.

    Raises TrackingError if a new run cannot be made: a training does not begin without one.
    """
    file = folder / RUN_FILE
    if not read_json(file):
        with answering():
            made = _make_run(config, run)
        write_text(file, json.dumps(made) + "\n")
    return read_tracking_run(folder)


def read_tracking_run(training: Path) -> dict[str, Any]:
    """Read run_id, experiment_id and start_time of a training's MLflow run. Raises StageError if RUN_FILE is gone."""
    if known := read_json(training / RUN_FILE):
        return known
    raise StageError(
        f"{training / RUN_FILE}, which names the training's MLflow run, is missing or damaged: restore it from a "
        f"backup (run_id, experiment_id and start_time in ms, of the run in MLflow), or train again with "
        f"`grpo stage train --run {training.parent.name} --force`"
    )


def _make_run(config: RunConfig, run: Path) -> dict[str, Any]:
    client = connect()
    experiment_id = open_experiment(client, config.registry.experiment)
    tags = {
        MLFLOW_RUN_NOTE: f"Not evaluated yet. Training of {escape(config.model.name_or_path)} in `{run}`. "
        f"{flow_run_link()}",
        MLFLOW_SOURCE_NAME: "grpo-flows",
        MLFLOW_SOURCE_TYPE: "LOCAL",
        HARDWARE: (hardware := name_hardware(find_gpu())),
        **_code_version(),
        **flow_run_tag(),
    }
    with suppress(KeyError, OSError):  # in some containers, the user has no name
        tags[MLFLOW_USER] = getpass.getuser()
    name = config.name
    if sweep := config.registry.sweep:
        tags[SWEEP], name = sweep, name.removeprefix(arm_prefix(sweep))
        if parent := read_json(sweep_folder(sweep) / RUN_FILE):
            tags[MLFLOW_PARENT_RUN_ID] = parent["run_id"]
    info = client.create_run(experiment_id, run_name=name, tags=tags).info
    try:
        _describe(client, info.run_id, config, run)
    except BaseException:
        with suppress(MlflowException):
            client.set_terminated(info.run_id, "FAILED")
        raise
    return {"run_id": info.run_id, "experiment_id": experiment_id, "start_time": info.start_time, HARDWARE: hardware}


def flow_run_tag() -> dict[str, str]:
    """Tag of an MLflow run with the id of this flow run; empty outside of one."""
    from prefect.runtime import flow_run  # reads which server is meant: a command may have to say so first

    return {FLOW_RUN: flow_run.id} if flow_run.id else {}


def flow_run_link() -> str:
    """Markdown sentence that links this flow run's page; "" outside of one, or if the page is unknown."""
    from prefect.runtime import flow_run

    from tasks.stages.prefect_address import flow_run_page

    page = flow_run_page(flow_run.id) if flow_run.id else ""
    return f"[Flow run in Prefect]({page}), while its server runs." if page else ""


def open_experiment(client: mlflow.MlflowClient, name: str) -> str:
    """Return the id of the experiment of this name; make it if there is none. Raises TrackingError if it is
    deleted."""
    while (experiment := client.get_experiment_by_name(name)) is None:
        try:
            return client.create_experiment(name, _artifact_location(), experiment_tags())
        except MlflowException as error:  # made by another command, or a request whose answer is lost
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
    if experiment.lifecycle_stage == "deleted":
        raise TrackingError(
            f"MLflow's experiment {name!r} was deleted: restore it in MLflow (mlflow experiments restore -x "
            f"{experiment.experiment_id}), or name another one in registry.experiment"
        )
    for tag, value in experiment_tags().items():
        if tag not in experiment.tags:
            client.set_experiment_tag(experiment.experiment_id, tag, value)
    return experiment.experiment_id


def _describe(client: mlflow.MlflowClient, run_id: str, config: RunConfig, run: Path) -> None:
    """Log everything known before a training: parameters, plan, data, the source of its own rewards."""
    planned = PLAN.read_receipt(run)
    known = {name: value for name, value in planned["plan"].items() if name != "sources" and value is not None}
    plan = {f"plan.{name}": str(value) for name, value in known.items()}
    plan |= {name: str(value) for name, value in flatten({"plan": {"sources": planned.get("sources", {})}}).items()}
    params = [Param(key, value) for key, value in (parameters(config) | plan).items()]
    for first in range(0, len(params), PARAMS_PER_REQUEST):
        client.log_batch(run_id, params=params[first : first + PARAMS_PER_REQUEST])
    client.log_inputs(run_id, _dataset_inputs(config, run))
    client.log_text(run_id, lineage_text(config), LINEAGE)
    for file in VALIDATE.path(run).iterdir():
        if file.suffix != ".parquet":  # the report, its picture and the findings
            client.log_artifact(run_id, str(file), run_files.DATASET)
    for place, path in kept_rewards(run).items():
        client.log_artifact(run_id, str(path), str(PurePosixPath(KEPT, place).parent))


def parameters(config: RunConfig) -> dict[str, str]:
    """MLflow's parameters of a training: the configuration's values by key. A table with users' keys, or a list among a
    reward's arguments, becomes one value, as JSON: keys may have characters that MLflow refuses in a name."""
    values = config.model_dump(mode="json", exclude_none=True)
    for section, key in FOREIGN_TABLES:
        if isinstance(table := values[section].get(key), dict) and table:
            values[section][key] = json.dumps(table)
    for source in values["data"]["sources"]:
        if source["columns"]:
            source["columns"] = json.dumps(source["columns"])
    for reward in values["rewards"]:
        for key, value in reward["args"].items():
            if isinstance(value, (dict, list)):
                reward["args"][key] = json.dumps(value)
    return {key: str(value) for key, value in flatten(values).items()}


def lineage_text(config: RunConfig) -> str:
    """Lineage keys of all stages, one per line: `validate 26dc974260cd…`."""
    return "".join(f"{stage} {key}\n" for stage, key in lineage_keys(config).items())


def dataset_digests(run: Path) -> dict[str, str]:
    """Shortened hash of the validated prompts of each data set (train, eval, further evaluation sets)."""
    folder, names = VALIDATE.path(run), VALIDATE.read_receipt(run)["num_prompts"]
    return {name: content_hash(str(folder / f"{name}.parquet"))[:DIGITS] for name in names}


def _dataset_inputs(config: RunConfig, run: Path) -> list[DatasetInput]:
    parts, counted = sources_of(config), VALIDATE.read_receipt(run)["num_prompts"]
    inputs = []
    for name, digest in dataset_digests(run).items():
        sources = [source for part, source in parts.items() if data_set(part) == name]
        local = all(Path(source.data).exists() for source in sources)
        places = [_place(source, local) for source in sources]
        where = places[0] if len(places) == 1 else {"parts": places}
        origin = ("local" if local else "hugging_face", json.dumps(where))
        context = InputTag(MLFLOW_DATASET_CONTEXT, "training" if name == "train" else "evaluation")
        dataset = Dataset(name, digest, *origin, profile=json.dumps({"num_rows": counted[name]}))
        inputs.append(DatasetInput(dataset, [context]))
    return inputs


def _place(source: Source, is_local: bool) -> dict[str, str]:
    if is_local:
        return {"uri": str(Path(source.data).resolve())}
    keys = {"path": source.data, "subset": source.subset, "split": source.split, "revision": source.revision}
    return {key: value for key, value in keys.items() if value}


def _code_version() -> dict[str, str]:
    """Tags with the commit of the repository that holds this code, and whether files differ from it; empty if there is
    no repository."""
    folder = Path(__file__).parent

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", Path(__file__).name)  # fails if this code is installed in another repository
        return {MLFLOW_GIT_COMMIT: git("rev-parse", "HEAD"), MLFLOW_GIT_DIRTY: str(bool(git("status", "--porcelain")))}
    except (OSError, subprocess.CalledProcessError):
        return {}


def trained_on_commit(client: mlflow.MlflowClient, run_id: str) -> dict[str, str]:
    """Git commit of the code that a training ran on, and whether files differed from it; empty if unknown."""
    tags = client.get_run(run_id).data.tags
    known = {"git.commit": tags.get(MLFLOW_GIT_COMMIT), "git.dirty": tags.get(MLFLOW_GIT_DIRTY)}
    return {name: value for name, value in known.items() if value}


def commit_text(commit: Mapping[str, str]) -> str:
    """Format a commit from `trained_on_commit`, such as "bcdcd2a8e0af with uncommitted changes"."""
    if not commit:
        return ""
    changes = " with uncommitted changes" if commit.get("git.dirty") == "True" else ""
    return f"{commit['git.commit'][:DIGITS]}{changes}"


def run_address(training: Path, tab: str = "") -> str:
    """Address of a training's run, or of one of its tabs, in a browser."""
    known = read_tracking_run(training)
    below = f"/{tab}" if tab else ""
    return f"{experiment_address(known)}/runs/{known['run_id']}{below}{TRAINING_MODE}"


def results_address(tracked: Mapping[str, Any]) -> str:
    """Address of the table of all runs of the experiment, with the columns of `view.py`."""
    return f"{experiment_address(tracked)}/runs{TRAINING_MODE}&viewStateShareKey={VIEW}"


def experiment_address(tracked: Mapping[str, Any]) -> str:
    """Address of a run's experiment in a browser."""
    return f"{_root()}/#/experiments/{tracked['experiment_id']}"


def version_address(name: str, version: str) -> str:
    """Address of a model version in a browser."""
    return f"{_root()}/#/models/{quote(name, safe='')}/versions/{version}{TRAINING_MODE}"


def run_page(training: Path) -> str:
    """Markdown link to a training's run."""
    address = run_address(training)
    return f"[{address}]({address})" + ("" if is_served() else " (while `grpo up` runs)")


def _root() -> str:
    """Address of MLflow's pages; if MLflow is a SQLite file, it works while `grpo up` serves it."""
    return tracking_uri().rstrip("/") if is_served() else os.environ.get(SERVED_AT, "http://127.0.0.1:5000")


def _artifact_location() -> str | None:
    """Location of artifacts: beside the SQLite file; None for a tracking server, which decides itself."""
    if tracking_uri().startswith("sqlite:"):
        return (storage_root() / "mlflow" / "artifacts").as_uri()
    return None
