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
    Programs send no Origin and are answered. `Host` must be an address, or a name that no foreign DNS can point here.
    If the request came to a loopback address, `Host` must be a loopback address or localhost: the local network's DNS
    can point names without a dot there too.
    """

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan" and (objection := _objection(scope)):
            await PlainTextResponse(f"{objection}\n", status_code=403)(scope, receive, send)
        else:
            await self.app(scope, receive, send)


def _objection(scope: Scope) -> str:
    """Reason why a request is refused; "" if it is not."""
    headers = Headers(scope=scope)
    for name in ("host", "origin"):
        if len(given := headers.getlist(name)) > 1:
            return f"The request has {len(given)} headers {name.title()}; send one"
    host, origin = headers.get("host", ""), headers.get("origin")
    here = _parse_url(f"//{host}")
    asked_at, _ = scope["server"]  # the address at which the connection was accepted
    if here is None or not _is_own_name(here.hostname or "", asked_at):
        return (
            f"Host {host!r} may be a foreign name that points to this machine; ask by the address {asked_at}, or put a "
            "server with a password in front (docs/how-to/servers.md)"
        )
    if origin is not None:
        there = _parse_url(origin)
        return "" if there and _is_same(there, here) else f"Origin {origin!r} is a page of another server"
    # Browsers send no Origin with a GET for an image, a script or a frame, nor when a person follows a link.
    follows_link = scope.get("method") == "GET" and headers.get("sec-fetch-dest") == "document"
    if headers.get("sec-fetch-site", "none") in ("none", "same-origin") or follows_link:
        return ""
    return "Sec-Fetch-Site says that a page of another server asks"


def _is_own_name(name: str, asked_at: str) -> bool:
    """True if `name` is an address, has no dot (no domain that anybody can register), or is the machine's own; if
    `asked_at` is a loopback address, only if `name` is one too, or localhost."""
    address, own = _address(name), _address(asked_at)
    if own is not None and own.is_loopback:
        return name == "localhost" or (address is not None and address.is_loopback)
    return address is not None or (bool(name) and ("." not in name or name in _full_names()))


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The IP address in `name`, None if it is not one; 127.0.0.1 for ::ffff:127.0.0.1."""
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


@functools.cache
def _full_names() -> set[str]:
    return {socket.gethostname().lower(), socket.getfqdn().lower()}


def _is_same(there: SplitResult, here: SplitResult) -> bool:
    same_machine = there.hostname == here.hostname or {there.hostname, here.hostname} <= LOOPBACK
    return there.scheme == "http" and same_machine and there.port == here.port


def _parse_url(url: str) -> SplitResult | None:
    """The parts of a URL; None if the text is not a URL."""
    try:
        parts = urlsplit(url)
        _ = parts.port  # read here for the ValueError that a wrong one raises
    except ValueError:
        return None
    return parts
