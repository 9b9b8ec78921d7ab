"""`grpo up`: Prefect and MLflow on one machine, over one storage, and `grpo serve`."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Annotated

import httpx2
import psutil
import typer

from flows.cli.terminal import refuse, say
from flows.serving.children import Child, describe_end, last_words, start_child
from flows.serving.environment import configure
from flows.serving.find_server import SERVER, SERVER_ID, START_SECONDS, is_ours, server_log
from flows.serving.ports import HOST, is_listening, refuse_taken
from flows.serving.up_file import Up, announced, new_up
from grpo_core.system.processes import importing
from tasks.stages.run_directory import storage_root

ENDING_SECONDS = 60  # for `grpo serve` and each server to end; a server may be creating its database


def up(
    prefect_port: Annotated[int, typer.Option(min=1, max=65535, help="port of the Prefect UI")] = 4200,
    mlflow_port: Annotated[int, typer.Option(min=1, max=65535, help="port of the MLflow UI")] = 5000,
) -> None:
    """Start the Prefect and MLflow servers on 127.0.0.1 over this storage, and `grpo serve`, until Ctrl-C."""
    configure()
    this = new_up(f"http://{HOST}:{prefect_port}", f"http://{HOST}:{mlflow_port}")
    with announced(this):
        refuse_taken({"--prefect-port": prefect_port, "--mlflow-port": mlflow_port})
        _serve(this, prefect_port, mlflow_port)


def _serve(this: Up, prefect_port: int, mlflow_port: int) -> None:
    with importing():
        from tasks.stages.mlflow_address import tracking_uri
        from tasks.tracking.runs import SERVED_AT, answering, connect

    if (uri := tracking_uri()).startswith("http"):
        refuse(f"MLFLOW_TRACKING_URI={uri} names a server that runs already: start only `grpo serve`")
    # SIGINT too: polars, imported above, installs a handler that can lose it.
    _on_signals(lambda *_: sys.exit(0))
    api = f"{this.prefect_url}/api"
    os.environ |= {
        "GRPO_STORAGE": str(storage_root()),
        SERVER_ID: this.server_id,
        SERVED_AT: this.mlflow_url,
        "PREFECT_API_URL": api,
        "PREFECT_UI_API_URL": api,  # without it, Prefect's pages ask the default port, whatever port serves them
        "PREFECT_UI_URL": this.prefect_url,  # for links in notifications
    }
    mlflow_log = storage_root() / "mlflow" / "server.log"
    store = ("--backend-store-uri", uri, "--host", HOST, "--uvicorn-opts", "--no-access-log")
    mlflow = ["mlflow", "server", "--port", str(mlflow_port), "--workers", "1", *store]
    say(f"Starting Prefect and MLflow over {storage_root()}")
    children: list[Child] = []
    try:
        prefect = ["flows.serving.prefect_server", str(prefect_port)]
        children.append(start_child(SERVER, prefect, ENDING_SECONDS, server_log()))
        with answering():
            connect()  # creates the database, which the server and trainings would otherwise create concurrently
        children.append(start_child("MLflow's server", mlflow, ENDING_SECONDS, mlflow_log))
        _wait(children, lambda: is_ours(api, this.server_id))
        say(f"Prefect  {this.prefect_url}  ready; writes to {server_log()}")
        mlflow_process = psutil.Process(children[1].process.pid)
        _wait(children, lambda: _answers(f"{this.mlflow_url}/health") and is_listening(mlflow_process, mlflow_port))
        say(f"MLflow   {this.mlflow_url}  ready; writes to {mlflow_log}")
        children.append(start_child("grpo serve", ["flows.cli.main", "serve"], ENDING_SECONDS))
        _wait_for_end(children)
    finally:
        _on_signals(signal.SIG_IGN)  # a second Ctrl-C would leave some running; each ends soon
        for child in reversed(children):  # flow runs report their end while the server still runs
            child.process.terminate()
            child.process.wait()


def _wait(children: Sequence[Child], is_ready: Callable[[], bool]) -> None:
    """Wait until `is_ready` returns true. Ends the command if a child ends, or if this takes too long."""
    deadline = time.monotonic() + START_SECONDS
    while not is_ready():
        for child in children:
            if child.process.poll() is not None:
                _end(child)
        if time.monotonic() > deadline:
            refuse(f"{children[-1].name} does not answer after {START_SECONDS} s; everything is ended", exit_status=1)
        time.sleep(0.1)


def _wait_for_end(children: Sequence[Child]) -> None:
    """Wait until one of the children ends, then end the command."""
    ends = {os.pidfd_open(child.process.pid): child for child in children}
    ended, _, _ = select.select(list(ends), [], [])
    _end(ends[ended[0]])


def _end(child: Child) -> None:
    refuse(f"{describe_end(child)}; everything else is ended too{last_words(child)}", exit_status=1)


def _answers(url: str) -> bool:
    with suppress(httpx2.HTTPError):
        return httpx2.get(url, timeout=5, verify=False).is_success  # http: no certificates to load
    return False


def _on_signals(handler: Callable[..., object] | signal.Handlers) -> None:
    """Set the handler of the signals that end a command in a terminal, except ignored ones, such as SIGHUP under
    nohup."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)
