"""`grpo up`: the servers of one machine and what they offer to trigger. `grpo serve`: only the latter. `grpo worker`:
what runs the triggered flows of a work pool."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from flows.environment import configure
from flows.server import find_api, wait_until_healthy

ENDING_SECONDS = 28  # that flow runs get when serving ends: a training takes 20 at most, and is to be gone in 30
SERVER_ENDING_SECONDS = 60  # that a server, which may be making its database, and serving each get to end

console = Console()


def up(
    prefect_port: Annotated[int, typer.Option(help="port of the Prefect UI")] = 4200,
    mlflow_port: Annotated[int, typer.Option(help="port of the MLflow UI")] = 5000,
) -> None:
    """Start the Prefect and MLflow servers on 127.0.0.1 over this storage, and `grpo serve`, until Ctrl-C."""
    configure()
    from tasks.tracking import SERVED_AT, connect, tracking_uri

    if tracking_uri().startswith("http"):
        _refuse(f"MLFLOW_TRACKING_URI={tracking_uri()} is a server that runs already: start `grpo serve` alone")
    # SIGINT too: the handler that polars, imported above, puts before Python's has let it get lost.
    _on_signals(lambda *_: sys.exit(0))
    connect()
    api = os.environ["PREFECT_API_URL"] = f"http://127.0.0.1:{prefect_port}/api"
    # Prefect's pages ask the default port otherwise, whatever port they are served on.
    os.environ["PREFECT_UI_API_URL"] = api
    os.environ["PREFECT_UI_URL"] = api.removesuffix("/api")  # for links in notifications
    os.environ[SERVED_AT] = f"http://127.0.0.1:{mlflow_port}"
    processes: list[subprocess.Popen[bytes]] = []

    def start(*command: str) -> None:
        # In a session of its own, out of reach of the terminal's Ctrl-C, which would end all of them at the same time.
        # The end of the pipe tells the supervisor that this process has died.
        supervisor = [sys.executable, "-m", "tasks.supervise", str(SERVER_ENDING_SECONDS), sys.executable, "-m"]
        processes.append(subprocess.Popen([*supervisor, *command], stdin=subprocess.PIPE, start_new_session=True))

    try:
        start("flows.prefect_server", str(prefect_port))
        store = ("--backend-store-uri", tracking_uri(), "--host", "127.0.0.1")
        start("mlflow", "server", "--port", str(mlflow_port), "--workers", "1", *store)
        if not wait_until_healthy(api, processes[0]):
            raise typer.Exit(1)
        start("flows.cli", "serve")
        console.print(f"Prefect  http://127.0.0.1:{prefect_port}\nMLflow   http://127.0.0.1:{mlflow_port}")
        console.print("Ctrl-C stops both, and what runs.", highlight=False)
        for process in processes:
            process.wait()
    finally:
        _on_signals(signal.SIG_IGN)  # a second Ctrl-C would leave some behind; none takes long
        for process in reversed(processes):  # what runs says how it ended while there is a server to hear it
            process.terminate()
            process.wait()


def serve() -> None:
    """Offer the pipeline and each stage in Prefect's UI, and run here what is triggered there, until Ctrl-C."""
    _set_up()
    _supervised("flows.deployments")


def worker(
    pool: Annotated[str, typer.Argument(help="the work pool, as in prefect.yaml")],
    limit: Annotated[int | None, typer.Option(help="flow runs at once; default: no limit")] = None,
) -> None:
    """Run the flow runs of a work pool of type process here, until Ctrl-C."""
    _set_up()
    at_once = ["--limit", str(limit)] if limit else []
    _supervised("prefect", "worker", "start", "--pool", pool, "--type", "process", *at_once)


def _on_signals(handler: Callable[..., object] | signal.Handlers) -> None:
    """Handle what ends a command in a terminal, except signals that are ignored, as SIGHUP is under nohup."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)


def _set_up() -> None:
    configure()
    api = find_api()
    if api is None:
        where = os.environ.get("PREFECT_API_URL", "its usual place, http://127.0.0.1:4200/api")
        _refuse(f"no Prefect server answers at {where}: start `grpo up` first (it serves too), or set PREFECT_API_URL")
    os.environ["PREFECT_API_URL"] = api
    from prefect.exceptions import PrefectHTTPStatusError

    from flows.set_up import set_up

    try:
        set_up()
    except PrefectHTTPStatusError as error:
        if error.response.status_code != 401:
            raise
        _refuse(f"the Prefect server at {api} wants a password: set PREFECT_API_AUTH_STRING=USER:PASSWORD as it has it")


def _refuse(message: str) -> NoReturn:
    Console(stderr=True).print(message, style="red", markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(2)


def _supervised(*command: str) -> None:
    """Become a process that runs `python -m COMMAND` and ends the flow runs with it. Prefect's own runner and worker
    leave those alone when they are told to end."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # a pipe there would be watched
    supervisor = [sys.executable, "-m", "tasks.supervise", str(ENDING_SECONDS), sys.executable, "-m", *command]
    os.execv(sys.executable, supervisor)
