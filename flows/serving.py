"""`grpo up`: the servers of one machine and what they offer to trigger. `grpo serve`: only the latter."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Annotated

import typer
from rich.console import Console

from flows.environment import configure
from flows.server import find_api, wait_until_healthy

console = Console()


def up(
    prefect_port: Annotated[int, typer.Option(help="port of the Prefect UI")] = 4200,
    mlflow_port: Annotated[int, typer.Option(help="port of the MLflow UI")] = 5000,
) -> None:
    """Start the Prefect and MLflow servers on 127.0.0.1 over this storage, and `grpo serve`, until Ctrl-C."""
    configure()
    from tasks.tracking import connect, tracking_uri

    connect()
    api = os.environ["PREFECT_API_URL"] = f"http://127.0.0.1:{prefect_port}/api"
    # Prefect's pages ask the default port otherwise, whatever port they are served on.
    os.environ["PREFECT_UI_API_URL"] = api
    os.environ["PREFECT_UI_URL"] = api.removesuffix("/api")  # for links in notifications
    local = ("--host", "127.0.0.1")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    processes: list[subprocess.Popen[bytes]] = []

    def start(*command: str) -> None:
        processes.append(subprocess.Popen([sys.executable, "-m", *command]))

    try:
        start("prefect", "server", "start", "--port", str(prefect_port), *local)
        store = ("--backend-store-uri", tracking_uri())
        start("mlflow", "server", "--port", str(mlflow_port), "--workers", "1", *store, *local)
        if not wait_until_healthy(api, processes[0]):
            raise typer.Exit(1)
        start("flows.cli", "serve")
        console.print(f"Prefect  http://127.0.0.1:{prefect_port}\nMLflow   http://127.0.0.1:{mlflow_port}")
        console.print("Ctrl-C stops both, and what runs.", highlight=False)
        for process in processes:
            process.wait()
    except KeyboardInterrupt:
        pass
    finally:
        for process in reversed(processes):  # what runs says how it ended while there is a server to hear it
            process.terminate()
            process.wait()


def serve() -> None:
    """Offer the pipeline and each stage in Prefect's UI, and run here what is triggered there, until Ctrl-C."""
    configure()
    api = find_api()
    if api is None:
        where = os.environ.get("PREFECT_API_URL", "its usual place, http://127.0.0.1:4200/api")
        message = f"no Prefect server answers at {where}: start `grpo up` first (it serves too), or set PREFECT_API_URL"
        Console(stderr=True).print(message, style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(2)
    os.environ["PREFECT_API_URL"] = api
    from flows import deployments

    deployments.serve()
