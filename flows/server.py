"""Prefect's API for the length of one command, when no server runs already."""

from __future__ import annotations

import atexit
import os
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

START_SECONDS = 180
STOP_SECONDS = 10


@contextmanager
def prefect_api() -> Iterator[str]:
    """The URL of Prefect's API: $PREFECT_API_URL, else a new server on 127.0.0.1 over $PREFECT_HOME that ends with us.

    The server starts while the body runs, which should import what is needed, Prefect first of all; leaving waits until
    it answers. Prefect's own ephemeral mode leaves its server running when the caller is killed. Ours stops after
    Prefect's exit handlers have sent what they still had to send.
    """
    if url := os.environ.get("PREFECT_API_URL"):
        yield url
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = ["-m", "flows.prefect_server", str(port)]
    log = Path(os.environ["PREFECT_HOME"]) / "server.log"
    with log.open("w") as output:
        server = subprocess.Popen(
            [sys.executable, "-m", "tasks.supervise", str(STOP_SECONDS), sys.executable, *command],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    atexit.register(_stop, server)
    url = os.environ["PREFECT_API_URL"] = f"http://127.0.0.1:{port}/api"
    yield url
    if not wait_until_healthy(url, server):
        raise RuntimeError(f"Prefect's server did not start; it wrote to {log}:\n{log.read_text()[-2000:]}")


def _stop(server: subprocess.Popen[bytes]) -> None:
    server.terminate()
    server.wait()


def find_api() -> str | None:
    """The API of the server that runs already: $PREFECT_API_URL, else Prefect's usual place; None when none answers."""
    url = os.environ.get("PREFECT_API_URL", "http://127.0.0.1:4200/api")
    return url if _answers(url) else None


def wait_until_healthy(url: str, server: subprocess.Popen[bytes]) -> bool:
    """Wait until the API answers; False when the server ended before, or takes too long."""
    deadline = time.monotonic() + START_SECONDS
    while server.poll() is None and time.monotonic() < deadline:
        if _answers(url):
            return True
        time.sleep(0.1)
    return False


def _answers(url: str) -> bool:
    trusted = ssl.create_default_context(cafile=os.environ.get("PREFECT_API_SSL_CERT_FILE"))
    try:
        urllib.request.urlopen(f"{url}/health", timeout=5, context=trusted)
    except urllib.error.HTTPError:  # it is there, and the client will say what it does not like
        return True
    except (urllib.error.URLError, OSError):
        return False
    return True
