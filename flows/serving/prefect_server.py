"""Prefect's server for the pages and programs of one machine: `python -m flows.serving.prefect_server PORT`.

`prefect server start` without a password obeys every web page that a browser on the machine has open: a page can
create a deployment whose steps are shell commands.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import urllib.parse

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from flows.serving.local_server import ID_HEADER, SERVER_ID, STORAGE_HEADER
from grpo_core.system.origin_check import OwnPagesOnly
from grpo_core.system.processes import importing, run_and_leave
from tasks.stages.run_directory import storage_root

SHUTDOWN_SECONDS = 5  # for requests in progress, such as the event streams of open pages


class Named:
    """ASGI middleware: each answer says over which storage the server is, and which id it was given when started."""

    def __init__(self, app: ASGIApp):
        self.app = app
        values = {ID_HEADER: os.environ.get(SERVER_ID, ""), STORAGE_HEADER: urllib.parse.quote(str(storage_root()))}
        self.headers = [(name.encode(), value.encode()) for name, value in values.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *self.headers]}
            await send(message)

        await self.app(scope, receive, send_named)


class Server(uvicorn.Server):
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start; if told to end meanwhile, end once the database is made: Prefect's services fail when they are stopped
        before they have begun. No request has come yet that would be cut off."""
        await super().startup(sockets)
        if self.should_exit:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.raise_signal(signal.SIGTERM)


def main() -> None:
    with importing():
        from prefect.server.api.server import create_app
        from prefect.settings import get_current_settings

    settings = get_current_settings().server
    config = uvicorn.Config(
        OwnPagesOnly(Named(create_app(final=True))),
        host="127.0.0.1",
        port=int(sys.argv[1]),
        log_level=settings.logging_level.lower(),
        timeout_keep_alive=settings.api.keepalive_timeout,
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
    )
    Server(config).run(sockets=[config.bind_socket()])  # bound before anything is done to the database


if __name__ == "__main__":
    run_and_leave(main)
