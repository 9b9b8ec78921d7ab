"""Environment variables of Prefect and MLflow, set before either is imported: where they keep their data, and that
they report nothing."""

from __future__ import annotations

import os
from pathlib import Path

from grpo_core.errors import GrpoError
from grpo_core.system.libraries import quiet_libraries
from tasks.stages.mlflow_address import tracking_uri
from tasks.stages.run_directory import storage_root

HEARTBEAT_SECONDS = 30  # between a flow run's heartbeats, Prefect's minimum; `set_up` makes the server watch for them
POLL_SECONDS = 2  # between a runner's looks for triggered runs; Prefect's default of 10 keeps people waiting
TAG = "grpo"  # of every flow run, by which the server's watch recognises ours
FILE_LEASES = "prefect.server.concurrency.lease_storage.filesystem"


THIS_MACHINE = ["127.0.0.1", "localhost", "::1"]


def configure() -> None:
    """Put Prefect's home under the storage root unless the environment says where it is, and keep requests to this
    machine away from proxies. Raises GrpoError if a folder cannot be written to, or if MLflow's address is refused."""
    quiet_libraries()
    tracking_uri()
    _ask_this_machine_directly()
    os.environ.setdefault("PREFECT_HOME", str(storage_root() / "prefect"))
    _make("GRPO_STORAGE", storage_root())
    _make("PREFECT_HOME", Path(os.environ["PREFECT_HOME"]))  # Prefect's database does not make its folder
    os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
    # By default leases are kept in memory: they are lost with the server, and their slots are never freed.
    os.environ.setdefault("PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE", FILE_LEASES)
    os.environ.setdefault("PREFECT_FLOWS_HEARTBEAT_FREQUENCY", str(HEARTBEAT_SECONDS))
    os.environ.setdefault("PREFECT_RUNNER_POLL_FREQUENCY", str(POLL_SECONDS))
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("MLFLOW_SERVER_ENABLE_JOB_EXECUTION", "false")  # seven processes for features not used here


def _make(variable: str, folder: Path) -> None:
    """Make the folder. Raises GrpoError if it cannot be made or written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise GrpoError(
            f"{folder} cannot be made: {error.strerror}; set {variable} to a folder that you may write to"
        ) from error
    if not os.access(folder, os.W_OK):
        raise GrpoError(f"{folder} cannot be written to; set {variable} to a folder that you may write to")


def _ask_this_machine_directly() -> None:
    """A proxy (HTTP_PROXY) has its own 127.0.0.1, and would read what goes to Prefect and MLflow on ours."""
    for name, other in [("no_proxy", "NO_PROXY"), ("NO_PROXY", "no_proxy")]:  # some libraries read only one
        listed = os.environ.get(name) or os.environ.get(other, "")
        hosts = [host.strip() for host in listed.split(",") if host.strip()]
        if "*" not in hosts:  # urllib takes it for all hosts only where it stands alone
            os.environ[name] = ",".join(dict.fromkeys([*hosts, *THIS_MACHINE]))
