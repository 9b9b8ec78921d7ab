"""Prefect's server for the browser and programs of one machine: `python -m flows.serving.prefect_server PORT`, or
`--socket NUMBER` for a socket that it inherits, which listens already.

Without a password, `prefect server start` obeys every web page open in a browser on the machine: a page could create a
deployment whose steps are shell commands. This server answers only its own pages.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
import urllib.parse
from pathlib import Path

import uvicorn
from sqlalchemy import make_url
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from flows.serving.find_server import ID_HEADER, SERVER_ID, STORAGE_HEADER
from grpo_core.system.origin_check import OwnPagesOnly
from grpo_core.system.processes import importing, run_and_leave
from grpo_core.system.progress import DUMP_SIGNAL
from tasks.stages.run_directory import storage_root

SHUTDOWN_SECONDS = 5  # for requests in progress, such as the event streams of open pages


class Named:
    """ASGI middleware that adds the server's storage, and the id that it was started with, to every answer."""

    def __init__(self, app: ASGIApp):
        self.app = app
        values = {
            ID_HEADER: os.environ.get(SERVER_ID, ""),
            STORAGE_HEADER: urllib.parse.quote(os.fsencode(storage_root())),
        }
        self.headers = [(name.encode(), value.encode()) for name, value in values.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *self.headers]}
            await send(message)

        await self.app(scope, receive, send_named)


class Server(uvicorn.Server):
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, once what the last server left in the database is put right. If told to end meanwhile, end before any
        request is accepted: Prefect's services fail if they are stopped before they have begun."""
        await _repair_database()
        await super().startup(sockets)
        if self.should_exit:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.raise_signal(signal.SIGTERM)


async def _repair_database() -> None:
    """Make the database, or bring it up to this version, then free lost slots and renew the crash watch. Ends the
    process with a sentence if a newer version of Prefect made the database."""
    from alembic.util.exc import CommandError
    from prefect.server.database import provide_database_interface

    from flows.serving.database_repair import free_lost_slots, renew_crash_watch

    database = provide_database_interface()
    try:
        await database.create_db()
    except CommandError as error:
        url = make_url(database.database_config.connection_url)
        sys.exit(
            f"Prefect's database {url.render_as_string()} was made by another version of Prefect ({error}): "
            "install that version, restore the database's backup, or set PREFECT_HOME to another folder"
        )
    await renew_crash_watch()
    await free_lost_slots()


def main() -> None:
    faulthandler.register(DUMP_SIGNAL, all_threads=True)  # of a server that hangs, what it waits for is known only so
    with importing():
        from prefect.server.api.server import create_app
        from prefect.settings import get_current_settings

    inherits = sys.argv[1] == "--socket"
    settings = get_current_settings().server
    config = uvicorn.Config(
        OwnPagesOnly(Named(create_app(final=True))),
        host="127.0.0.1",
        port=0 if inherits else int(sys.argv[1]),
        log_level=settings.logging_level.lower(),
        timeout_keep_alive=settings.api.keepalive_timeout,
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
    )
    # Bind the port before touching files.
    listening = socket.socket(fileno=int(sys.argv[2])) if inherits else config.bind_socket()
    address = settings.database.connection_url
    scheme, _, database = (address.get_secret_value() if address else "").partition(":///")
    files = [Path(database)] if scheme.startswith("sqlite") and Path(database).is_absolute() else []
    for file in (*files, settings.memo_store_path):
        if not file.exists():
            file.touch()  # SQLite and Prefect would let only the owner write, whatever the umask
    Server(config).run(sockets=[listening])


if __name__ == "__main__":
    run_and_leave(main)
