"""Where Prefect and MLflow keep their data, set before either is imported; neither reports home."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn

from grpo_core.system.libraries import quiet_libraries
from tasks.stages.run_directory import storage_root

HEARTBEAT_SECONDS = 30  # of a flow run, the least that Prefect allows; `set_up` has the server watch for it
POLL_SECONDS = 2  # between a runner's looks for triggered runs; Prefect's own 10 keep a person waiting
TAG = "grpo"  # of every flow run, by which the server's watch knows ours
FILE_LEASES = "prefect.server.concurrency.lease_storage.filesystem"


THIS_MACHINE = ["127.0.0.1", "localhost", "::1"]


def configure() -> None:
    """Put Prefect's home under the storage root unless the environment says where it is; have no proxy asked for what
    is on this machine. Ends the command if there is no room for either's data."""
    quiet_libraries()
    _ask_this_machine_directly()
    os.environ.setdefault("PREFECT_HOME", str(storage_root() / "prefect"))
    _make("GRPO_STORAGE", storage_root())
    _make("PREFECT_HOME", Path(os.environ["PREFECT_HOME"]))  # Prefect's database does not make its folder
    os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
    # In memory, as by default, they are lost with the server, and the slots of who held one are never free again.
    os.environ.setdefault("PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE", FILE_LEASES)
    os.environ.setdefault("PREFECT_FLOWS_HEARTBEAT_FREQUENCY", str(HEARTBEAT_SECONDS))
    os.environ.setdefault("PREFECT_RUNNER_POLL_FREQUENCY", str(POLL_SECONDS))
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("MLFLOW_SERVER_ENABLE_JOB_EXECUTION", "false")  # seven processes for features not used here


def _make(variable: str, folder: Path) -> None:
    """Make the folder; end the command with a sentence if it cannot be made or written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        _end(f"{folder} cannot be made: {error.strerror}; set {variable} to a folder that you may write to")
    if not os.access(folder, os.W_OK):
        _end(f"{folder} cannot be written to; set {variable} to a folder that you may write to")


def _end(message: str) -> NoReturn:
    print(message, file=sys.stderr)
    sys.exit(2)


def _ask_this_machine_directly() -> None:
    """A proxy (HTTP_PROXY) has a 127.0.0.1 of its own, and would read what goes to Prefect and MLflow on ours."""
    for name, other in [("no_proxy", "NO_PROXY"), ("NO_PROXY", "no_proxy")]:  # some libraries read only one
        listed = os.environ.get(name) or os.environ.get(other, "")
        hosts = [host.strip() for host in listed.split(",") if host.strip()]
        if "*" not in hosts:  # urllib takes it for all hosts only where it stands alone
            os.environ[name] = ",".join(dict.fromkeys([*hosts, *THIS_MACHINE]))
