"""Middleware with which a server on this machine answers no web pages except its own."""

from __future__ import annotations

import functools
import ipaddress
import socket
from urllib.parse import SplitResult, urlsplit

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

LOOPBACK = {"127.0.0.1", "localhost", "::1"}


class OwnPagesOnly:
    """ASGI middleware: requests that another server's page causes in a browser get status 403, websockets too.

    CORS alone keeps a page from reading answers, not from sending requests without a body or opening websockets.
    Programs send no Origin and are answered. `Host` must be an address or a name that no foreign DNS can point here.
    """

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan" and (objection := _objection(Headers(scope=scope), scope.get("method"))):
            await PlainTextResponse(f"{objection}\n", status_code=403)(scope, receive, send)
        else:
            await self.app(scope, receive, send)


def _objection(headers: Headers, method: str | None) -> str:
    """Why a request is refused; "" if it is not. `method`: None for a websocket."""
    host, origin = headers.get("host", ""), headers.get("origin")
    here = _split(f"//{host}")
    if here is None or not _is_own_name(here.hostname or ""):
        return (
            f"Host {host!r} may be a foreign name that points to this machine; ask by the machine's address, such as "
            "127.0.0.1, or put a server with a password in front (docs/operations.md#servers)"
        )
    if origin is not None:
        there = _split(origin)
        return "" if there and _is_same(there, here) else f"Origin {origin!r} is a page of another server"
    # Browsers send no Origin with a GET for an image, a script or a frame, nor when a person follows a link.
    follows_link = method == "GET" and headers.get("sec-fetch-dest") == "document"
    if headers.get("sec-fetch-site", "none") in ("none", "same-origin") or follows_link:
        return ""
    return "Sec-Fetch-Site says that a page of another server asks"


def _is_own_name(name: str) -> bool:
    """Whether `name` is an address, has no dot (no domain that anybody can register), or is the machine's own."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return bool(name) and ("." not in name or name in _full_names())
    return True


@functools.cache
def _full_names() -> set[str]:
    return {socket.gethostname().lower(), socket.getfqdn().lower()}


def _is_same(there: SplitResult, here: SplitResult) -> bool:
    same_machine = there.hostname == here.hostname or {there.hostname, here.hostname} <= LOOPBACK
    return there.scheme == "http" and same_machine and there.port == here.port


def _split(url: str) -> SplitResult | None:
    """The parts of a URL; None if it is none."""
    try:
        parts = urlsplit(url)
        _ = parts.port  # read here for the ValueError that a wrong one raises
    except ValueError:
        return None
    return parts
