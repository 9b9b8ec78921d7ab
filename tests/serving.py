"""`grpo up` in a process of its own: real servers on free ports, and what a person does in their UI, by the API."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

START_SECONDS = 300
RUN_SECONDS = 600
FINAL = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}


@dataclass(frozen=True)
class Served:
    """`up`: the process of `grpo up`; `log`: what it and its children print; `api`: a client of Prefect's API."""

    prefect_url: str
    mlflow_url: str
    storage: Path
    up: subprocess.Popen[bytes]
    log: Path
    api: httpx.Client

    def trigger(self, deployment: str, **parameters: Any) -> str:
        """Id of a new flow run of `FLOW/NAME`."""
        answer = self.request(deployment, **parameters)
        answer.raise_for_status()
        return answer.json()["id"]

    def request(self, deployment: str, **parameters: Any) -> httpx.Response:
        """What the API answers to a new flow run with these parameters."""
        known = self.get(f"/deployments/name/{deployment}")
        return self.api.post(f"/deployments/{known['id']}/create_flow_run", json={"parameters": parameters})

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
            time.sleep(0.2)
        raise TimeoutError(f"flow run {run_id} is {run['state']}\n{self.messages(run_id)}")

    def tasks(self, run_id: str) -> list[tuple[str, str]]:
        """(task, state) in the order in which they began."""
        runs = self.filter("task_runs", flow_runs={"id": {"any_": [run_id]}})
        runs.sort(key=lambda run: run["expected_start_time"])
        return [(run["name"].split("-")[0], run["state_name"]) for run in runs]

    def messages(self, run_id: str) -> str:
        """The log of a flow run."""
        logs = self.filter("logs", logs={"flow_run_id": {"any_": [run_id]}}, sort="TIMESTAMP_ASC")
        return "\n".join(log["message"] for log in logs)


@contextmanager
def serving(storage: Path, **environment: str) -> Iterator[Served]:
    """`grpo up` over this storage until the body ends; `environment`: further variables of its processes."""
    prefect_port, mlflow_port = _free_ports(2)
    url = f"http://127.0.0.1:{prefect_port}"
    log = storage / "up.log"
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PREFECT_", "MLFLOW_"))}
    with log.open("wb") as output:
        up = subprocess.Popen(
            [
                *(sys.executable, "-m", "flows.cli", "up"),
                *("--prefect-port", str(prefect_port), "--mlflow-port", str(mlflow_port)),
            ],
            env={**kept, "GRPO_STORAGE": str(storage), "PREFECT_SERVER_ANALYTICS_ENABLED": "false", **environment},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        with httpx.Client(base_url=f"{url}/api", timeout=60) as api:
            served = Served(url, f"http://127.0.0.1:{mlflow_port}", storage, up, log, api)
            _wait_until_served(served)
            yield served
    finally:
        up.send_signal(signal.SIGTERM)
        try:
            up.wait(timeout=120)
        finally:
            if up.poll() is None:
                os.killpg(up.pid, signal.SIGKILL)


def _wait_until_served(served: Served) -> None:
    """Until each deployment is registered and its runner asks for work, and MLflow answers."""
    deadline = time.monotonic() + START_SECONDS
    while served.up.poll() is None and time.monotonic() < deadline:
        try:
            ready = [d for d in served.filter("deployments") if d["status"] == "READY"]
            if len(ready) == 6 and httpx.get(f"{served.mlflow_url}/health", timeout=5).is_success:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.2)
    raise RuntimeError(f"`grpo up` does not serve:\n{served.log.read_text()[-4000:]}")


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports
