"""Environment variables of Prefect and MLflow, set before either is imported: they say where data is kept, and switch
off telemetry."""

from __future__ import annotations

import os
import tempfile
from importlib.util import find_spec
from pathlib import Path

from grpo_core.errors import GrpoError
from grpo_core.system.addresses import holds_secret
from grpo_core.system.libraries import quiet_libraries
from tasks.stages.access import check_access, check_umask
from tasks.stages.mlflow_address import tracking_uri
from tasks.stages.run_directory import storage_root

HEARTBEAT_SECONDS = 30  # between a flow run's heartbeats, Prefect's minimum; `set_up` makes the server watch them
POLL_SECONDS = 2  # between a runner's polls for triggered runs; Prefect's default of 10 keeps people waiting
TAG = "grpo"  # of every flow run of ours: the server's crash watch covers only these
FOLDERS = ("runs", "sweeps", "models", "pace", "judge", "mlflow", "line", "trash")  # of a storage, but Prefect's home
FILE_LEASES = "flows.serving.leases"


THIS_MACHINE = ["127.0.0.1", "localhost", "::1"]


def configure() -> None:
    """Put Prefect's home under the storage root unless the environment sets it, and send requests to this machine
    through no proxy. Raises GrpoError if a folder cannot be written to, or if the address of
    Prefect or MLflow contains a secret."""
    quiet_libraries()
    tracking_uri()
    if holds_secret(os.environ.get("PREFECT_API_URL", "")):
        raise GrpoError(
            "PREFECT_API_URL contains a user, password or token, and links and events show the URL: leave it out, and "
            "set PREFECT_API_AUTH_STRING=USER:PASSWORD, which is sent as basic authentication, to a proxy too"
        )
    _bypass_proxies()
    os.environ.setdefault("PREFECT_HOME", str(storage_root() / "prefect"))
    root, home = storage_root(), Path(os.environ["PREFECT_HOME"])
    _make_folder("GRPO_STORAGE", root)
    check_access(root)
    check_umask(root)
    _make_folder("PREFECT_HOME", home)  # Prefect does not create its database's folder
    check_access(home, *(root / name for name in FOLDERS), *home.glob("*.db*"), *(root / "mlflow").glob("*.db*"))
    # By default, both are in the user's home, which service users may not have, whatever PREFECT_HOME says.
    os.environ.setdefault("PREFECT_RESULTS_LOCAL_STORAGE_PATH", str(home / "storage"))
    os.environ.setdefault("PREFECT_SERVER_MEMO_STORE_PATH", str(home / "memo_store.toml"))
    # By default, its pages are written into its package, which may be another user's: then the server has no pages.
    if not os.access(_package_of_prefect() / "server", os.W_OK):
        os.environ.setdefault("PREFECT_SERVER_UI_STATIC_DIRECTORY", str(home / "ui"))
    os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
    # By default, leases are kept in memory: if the server dies, they are lost and their slots never freed.
    os.environ.setdefault("PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE", FILE_LEASES)
    # By default, flow runs are never deleted; now 90 days after their end, with their logs and artifacts.
    os.environ.setdefault("PREFECT_SERVER_SERVICES_DB_VACUUM_ENABLED", "events,flow_runs")
    os.environ.setdefault("PREFECT_FLOWS_HEARTBEAT_FREQUENCY", str(HEARTBEAT_SECONDS))
    os.environ.setdefault("PREFECT_RUNNER_POLL_FREQUENCY", str(POLL_SECONDS))
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("MLFLOW_SERVER_ENABLE_JOB_EXECUTION", "false")  # seven processes for features not used here


def keep_temporary_files_at_home() -> None:
    """For this process alone. Prefect's runner makes a folder of the same name for all users in the temporary folder:
    the second user of a machine could not serve."""
    folder = Path(os.environ["PREFECT_HOME"], "tmp")
    folder.mkdir(exist_ok=True)
    tempfile.tempdir = str(folder)


def _package_of_prefect() -> Path:
    """Its folder. It is not imported: it would read the environment."""
    spec = find_spec("prefect")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def _make_folder(variable: str, folder: Path) -> None:
    """Make the folder. Raises GrpoError if it cannot be made, or cannot hold a database."""
    if "?" in str(folder):
        raise GrpoError(
            f"{folder} cannot hold a database, whose address would end at the '?'; set {variable} to another folder"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise GrpoError(
            f"{folder} cannot be created: {error.strerror}; set {variable} to a folder that you may write to"
        ) from error


def _bypass_proxies() -> None:
    """Exempt this machine from proxies: a proxy (HTTP_PROXY) has its own 127.0.0.1, and would read what is sent to
    Prefect and MLflow on ours."""
    for name, other in [("no_proxy", "NO_PROXY"), ("NO_PROXY", "no_proxy")]:  # some libraries read only one
        listed = os.environ.get(name) or os.environ.get(other, "")
        hosts = [host.strip() for host in listed.split(",") if host.strip()]
        if "*" not in hosts:  # urllib reads it as all hosts only if it stands alone
            os.environ[name] = ",".join(dict.fromkeys([*hosts, *THIS_MACHINE]))
