"""The connection to a judge's server, what can be sent over it, and the key, which goes to that server only."""

from __future__ import annotations

import functools
import ipaddress
import os
import re
import ssl
from collections.abc import Mapping
from math import isfinite
from typing import Any
from urllib.parse import urlsplit

from grpo_core.config.base import flatten
from grpo_core.errors import ConfigError, RewardError
from grpo_core.system.addresses import key_in

SENT = {"accept", "accept-encoding", "authorization", "connection", "content-length", "content-type", "host"}
KEY_NAME = re.compile(r"[A-Z0-9_]+_API_KEY")


def api_key(name: str | None) -> str | None:
    """The key in the environment variable `name`; None without a name.

    Raises RewardError if the name is not that of a key, or the value is missing or cannot be sent.
    """
    if name is None:
        return None
    if not KEY_NAME.fullmatch(name):
        raise RewardError(f"api_key_env={name!r} must name a variable like JUDGE_API_KEY: no other is sent out")
    try:
        key = key_in(name)
    except ConfigError as error:
        raise RewardError(f"api_key_env={name!r}: {error}") from None
    if not key:
        raise RewardError(f"api_key_env={name!r}: the environment variable {name} is not set")
    return key


def connect(base_url: str, key: str | None, max_retries: int, seconds: float) -> Any:
    """Client of one call, for each of which the key is read again."""
    import openai

    # A redirect would take the question to an unknown server, and the client's default key the secret of another one;
    # a proxy (HTTP_PROXY) would read both, unless the connection through it is encrypted from end to end.
    key = key or "none"
    address = urlsplit(base_url)
    http = openai.DefaultAsyncHttpxClient(
        verify=_certificates(),
        follow_redirects=False,
        trust_env=address.scheme == "https" and not _is_loopback(address.hostname or ""),
        event_hooks={"request": [functools.partial(_strip, key)]},
    )
    return openai.AsyncOpenAI(
        base_url=base_url, api_key=key, max_retries=max_retries, timeout=seconds, http_client=http
    )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


async def _strip(key: str, request: Any) -> None:
    """Remove the headers that the client takes from the environment (OPENAI_CUSTOM_HEADERS, OPENAI_ORG_ID)."""
    for name in {*request.headers} - SENT:
        del request.headers[name]
    request.headers["Authorization"] = f"Bearer {key}"


@functools.cache
def _certificates() -> ssl.SSLContext:
    """Read the certificates, once, since that takes longer than a request."""
    import certifi

    return ssl.create_default_context(cafile=os.environ.get("SSL_CERT_FILE") or certifi.where())


def hide_key(key: str | None, name: str | None, text: str) -> str:
    """Return the text with the variable's name in the key's place."""
    return text.replace(key, f"${name}") if key else text


def json_problem(args: Mapping[str, Any]) -> str:
    """The first of the args that cannot be sent as JSON, with advice; "" if all can. TOML has dates, inf and nan."""
    for key, value in flatten(args, "args.").items():
        if not isinstance(value, (str, int, float, type(None))) or (isinstance(value, float) and not isfinite(value)):
            return f"{key}={value} cannot be sent as JSON; write dates and times as text, and no inf or nan"
    return ""
