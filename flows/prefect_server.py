"""Prefect's server for the pages and programs of one machine: `python -m flows.prefect_server PORT`.

`prefect server start` without a password obeys every web page that a browser on the machine has open: a page can
create a deployment whose steps are shell commands. Here a request that a foreign page has caused is refused before
Prefect sees it.
"""

from __future__ import annotations

import sys
from urllib.parse import SplitResult, urlsplit

import uvicorn
from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

LOCAL = {"127.0.0.1", "localhost", "::1"}
SHUTDOWN_SECONDS = 5  # for requests in progress, such as the event streams of open pages


def only_own_pages(app: ASGIApp) -> ASGIApp:
    """`app`, except that requests from web pages of other origins get status 403. Programs send no Origin and pass."""

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan" and (objection := _objection(Headers(scope=scope), scope.get("method"))):
            await PlainTextResponse(f"{objection}\n", status_code=403)(scope, receive, send)
        else:
            await app(scope, receive, send)

    return guarded


def _objection(headers: Headers, method: str | None) -> str:
    """Why a request is refused; "" if it is not. `method`: None for a websocket."""
    host, origin = headers.get("host", ""), headers.get("origin")
    here = _split(f"//{host}")
    if here is None:
        return (
            f"Host {host!r} is not this machine: a name that somebody else's DNS resolves to 127.0.0.1 would let a web "
            "page in. Open http://127.0.0.1, or set up a server with a password (docs/operations.md#servers)"
        )
    if origin is not None:
        there = _split(origin)
        if there and there.scheme == "http" and there.port == here.port:
            return ""
        return f"Origin {origin!r} is another server's page"
    # Browsers send no Origin with a GET for an image, a script or a frame, nor when a person follows a link.
    follows_link = method == "GET" and headers.get("sec-fetch-dest") == "document"
    if headers.get("sec-fetch-site", "none") in ("none", "same-origin") or follows_link:
        return ""
    return "Sec-Fetch-Site says that another server's page asks"


def _split(url: str) -> SplitResult | None:
    """The parts of a URL on this machine; None for any other, and for what is no URL."""
    try:
        parts = urlsplit(url)
        return parts if parts.hostname in LOCAL and parts.port != 0 else None
    except ValueError:
        return None


def main() -> None:
    from prefect.server.api.server import create_app
    from prefect.settings import get_current_settings

    settings = get_current_settings().server
    config = uvicorn.Config(
        only_own_pages(create_app(final=True)),
        host="127.0.0.1",
        port=int(sys.argv[1]),
        log_level=settings.logging_level.lower(),
        timeout_keep_alive=settings.api.keepalive_timeout,
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
    )
    uvicorn.Server(config).run(sockets=[config.bind_socket()])  # bound before anything is done to the database


if __name__ == "__main__":
    main()
