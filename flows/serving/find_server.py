"""The Prefect server that a command works with: one that runs already, or one started for this command, which is
started again if it dies.

A command never uses a server only because it answers at Prefect's usual port: it may be a colleague's, whose runs write
to another storage.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import secrets
import socket
import ssl
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from flows.serving.children import describe_end, last_error, start_child
from flows.serving.up_file import ServerError, Up, find_up
from tasks.stages.run_directory import storage_root

if TYPE_CHECKING:
    import httpx2

START_SECONDS = 180
STOP_SECONDS = 10
STARTS = 3  # in a row, of a server that ends before it answers
SERVER = "Prefect's server"  # in messages
USUAL_API = "http://127.0.0.1:4200/api"
SERVER_ID = "GRPO_SERVER_ID"  # in the environment of our Prefect server; every answer contains it
ID_HEADER, STORAGE_HEADER = "grpo-server-id", "grpo-storage"


@dataclass(frozen=True)
class Answer:
    """Id and storage from a server's answer; both empty if it is not a Prefect server of this project."""

    server_id: str
    storage: str


@contextmanager
def server_for_command() -> Iterator[str]:
    """Give the URL of Prefect's API, as `_prefect_api` does: import in the body what is needed, while a server starts.
    After the body, the server has the GPU limit. Raises ServerError if there is no server."""
    with _prefect_api() as url:
        yield url
    from flows.serving.server_setup import ensure_gpu_limit, prefect_answering

    with prefect_answering():
        ensure_gpu_limit()


def use_running_server() -> bool:
    """True if a Prefect server runs for this storage. Then the flow run that follows is recorded there, triggers its
    automations, and logs only there. Raises ServerError if the server asks for a password."""
    if (api := find_api()) is None:
        return False
    os.environ["PREFECT_API_URL"] = api
    os.environ["PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL"] = "CRITICAL"
    from flows.serving.server_setup import check_access

    check_access()
    return True


@contextmanager
def _prefect_api() -> Iterator[str]:
    """Give the URL of Prefect's API: $PREFECT_API_URL, or that of the `grpo up` of this storage, or that of a new
    server on 127.0.0.1 over $PREFECT_HOME that ends with this process.

    The server may still be starting while the body runs, so the body should import what is needed, Prefect first; after
    the body, this waits until the server answers. Prefect's own ephemeral mode is not used: it leaves its server
    running when the caller is killed. Ours stops after Prefect's exit handlers have sent the last logs and states.
    Raises ServerError if the server does not start, or as `_named_api` does.
    """
    if url := _named_api():
        yield url
        return
    if up := find_up():
        url = os.environ["PREFECT_API_URL"] = f"{up.prefect_url}/api"
        yield url
        _wait_for(up)
        return
    server = _OwnServer()
    os.environ["PREFECT_API_URL"] = server.url
    yield server.url
    server.watch()


class _OwnServer:
    """A Prefect server over $PREFECT_HOME that ends with this process.

    This process holds the socket on which it listens: requests wait while the server starts, and while it is started
    again, and no other program can take the port.
    """

    def __init__(self) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}/api"
        self.server_id = secrets.token_hex(8)
        self.lock, self.is_ending = threading.Lock(), False
        self._start()
        atexit.register(self._end)

    def watch(self) -> None:
        """Wait until the server answers; from then on, start it again when it ends. Raises ServerError if it does not
        answer."""
        if not self._answers():
            raise ServerError(f"{SERVER} did not start: {self._reason()}")
        threading.Thread(target=self._keep_running, daemon=True).start()

    def _keep_running(self) -> None:
        log = logging.getLogger("prefect.serving")  # below Prefect's own, to look like the lines around it
        while True:
            ended = describe_end(self.child)
            if self.is_ending:
                return
            log.warning("%s; it is started again. It writes to %s", ended, self.child.log)
            if not any(self._start_again() for _ in range(STARTS)):
                if self.is_ending:
                    return
                self.socket.close()  # requests fail from now on, instead of waiting
                log.error("%s cannot be started again, what runs goes on without it: %s", SERVER, self._reason())
                return

    def _start_again(self) -> bool:
        self._start()
        if self._answers():
            return True
        self.child.process.terminate()  # if it hangs
        return False

    def _reason(self) -> str:
        from tasks.stages.prefect_address import full_database

        return full_database() or f"{last_error(self.child)}. It wrote to {self.child.log}"

    def _answers(self) -> bool:
        return wait_until_healthy(self.url, self.server_id, lambda: self.child.process.poll() is None)

    def _start(self) -> None:
        with self.lock:
            if not self.is_ending:
                listening = self.socket.fileno()
                self.child = start_child(
                    SERVER,
                    ["flows.serving.prefect_server", "--socket", str(listening)],
                    STOP_SECONDS,
                    server_log(),
                    {**os.environ, SERVER_ID: self.server_id},
                    [listening],
                )

    def _end(self) -> None:
        with self.lock:
            self.is_ending = True
        self.child.process.terminate()
        self.child.process.wait()


def server_log() -> Path:
    """The file to which our Prefect server writes its output."""
    return Path(os.environ["PREFECT_HOME"]) / "server.log"


def find_api() -> str | None:
    """Return the API of a server that runs already: $PREFECT_API_URL, else that of the `grpo up` of this storage; None
    if there is neither. Raises ServerError if it does not answer."""
    if url := _named_api():
        return url
    up = find_up()
    if up is None:
        return None
    _wait_for(up)
    return f"{up.prefect_url}/api"


def _named_api() -> str | None:
    """Return $PREFECT_API_URL; None if it is not set. Raises ServerError unless Prefect's API answers there."""
    if (url := os.environ.get("PREFECT_API_URL")) and (problem := _problem_of_api(url)):
        raise ServerError(
            f"PREFECT_API_URL={url}: {problem}. Start that server, correct the URL (http://HOST:PORT/api), or unset "
            "the variable: without it, the `grpo up` of this storage is used"
        )
    return url or None


def _problem_of_api(url: str) -> str:
    import httpx2

    try:
        answer = _get_health(url)
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        return f"no Prefect server answers there ({error})"
    is_missing = answer.status_code == 404 and "/workspaces/" not in url  # Prefect Cloud may have no such page
    if is_missing or (answer.is_success and answer.text != "true"):
        return "what answers there is not Prefect's API"
    return ""  # Prefect's client reports other statuses, such as that of a missing password


def find_api_to_serve() -> str:
    """Return the API of the server whose flow runs will run here. Raises ServerError if there is none, or if it belongs
    to the `grpo up` of another storage: two processes that serve one server take each other's runs."""
    url, here = find_api(), str(storage_root())
    if url is None:
        stranger = ask(USUAL_API)
        of = f", serving {stranger.storage or 'another project'}, is not used unasked" if stranger else ""
        there = f" (what answers at {USUAL_API}{of})" if stranger else ""
        raise ServerError(f"no server is running for {here}{there}; start one with `grpo up`, or set PREFECT_API_URL")
    answer = ask(url)
    if answer and answer.storage not in ("", here):
        raise ServerError(
            f"the Prefect server at {url} serves the storage {answer.storage}, not {here}: runs triggered there would "
            f"run in either. Set GRPO_STORAGE={answer.storage} to share it, or start a `grpo up` of your "
            "own (--prefect-port, --mlflow-port)"
        )
    return url


def _wait_for(up: Up) -> None:
    url = f"{up.prefect_url}/api"
    if not wait_until_healthy(url, up.server_id, lambda: find_up() == up):
        raise ServerError(f"the Prefect server of {up} does not answer at {url}: end it (Ctrl-C) and start it again")


def wait_until_healthy(url: str, server_id: str, is_running: Callable[[], bool]) -> bool:
    """Wait until the API of the server with this id answers. Returns False if the server ends first, or takes too
    long."""
    deadline = time.monotonic() + START_SECONDS
    while is_running() and time.monotonic() < deadline:
        if is_ours(url, server_id):
            return True
        time.sleep(0.1)
    return False


def is_ours(url: str, server_id: str) -> bool:
    """True if the server with this id answers there, rather than another one that has taken its port."""
    answer = ask(url)
    return answer is not None and answer.server_id == server_id


@functools.cache  # a server that starts is asked many times, and the certificates take longer than the question
def _trusted(certificates: str | None) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=certificates)


def ask(url: str) -> Answer | None:
    """The answer of the API at this URL; None if nothing answers. An error status is an answer too."""
    import httpx2  # imported here, so that it does not delay the start of a server

    try:
        headers = _get_health(url).headers
    except (httpx2.HTTPError, httpx2.InvalidURL):
        return None
    storage = urllib.parse.unquote_to_bytes(headers.get(STORAGE_HEADER, ""))  # a path may be no text
    return Answer(headers.get(ID_HEADER, ""), os.fsdecode(storage))


def _get_health(url: str) -> httpx2.Response:
    import httpx2

    trusted = _trusted(os.environ.get("PREFECT_API_SSL_CERT_FILE"))
    return httpx2.get(f"{url.rstrip('/')}/health", timeout=5, verify=trusted, follow_redirects=True)
