"""Where Prefect and MLflow keep their data, set before either is imported; neither reports home."""

from __future__ import annotations

import os
from pathlib import Path

from grpo_core.environment import quiet_libraries
from tasks.storage import storage_root

HEARTBEAT_SECONDS = 30  # of a flow run, the least that Prefect allows; `set_up` has the server watch for it
POLL_SECONDS = 2  # between a runner's looks for triggered runs; Prefect's own 10 keep a person waiting
TAG = "grpo"  # of every flow run, by which the server's watch knows ours
FILE_LEASES = "prefect.server.concurrency.lease_storage.filesystem"


def configure() -> None:
    """Put Prefect's home under the storage root unless the environment says where it is."""
    quiet_libraries()
    os.environ.setdefault("PREFECT_HOME", str(storage_root() / "prefect"))
    Path(os.environ["PREFECT_HOME"]).mkdir(parents=True, exist_ok=True)  # Prefect's database does not make its folder
    os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
    # In memory, as by default, they are lost with the server, and the slots of who held one are never free again.
    os.environ.setdefault("PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE", FILE_LEASES)
    os.environ.setdefault("PREFECT_FLOWS_HEARTBEAT_FREQUENCY", str(HEARTBEAT_SECONDS))
    os.environ.setdefault("PREFECT_RUNNER_POLL_FREQUENCY", str(POLL_SECONDS))
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_SERVER_ENABLE_JOB_EXECUTION", "false")  # seven processes for features not used here
