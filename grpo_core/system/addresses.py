"""Addresses and keys. Links, events, records and error messages show an address as it is, and must not show a key."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from grpo_core.errors import ConfigError

ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*://.+", re.I)
WEB = re.compile(r"(?:\w+\+)?(?:https?|wss?):", re.I)  # git+https: too
HARMLESS = {"api-version"}  # parameters of a web address that hold none
# Names of a database's parameters, also of those within one (odbc_connect).
PARAMETER = re.compile(
    r"[?&;#](?:[^=&;]*(?:pass(?!file)|pwd|token|secret|api_?key|access_?key|credential|signature)[^=&;]*|sig|auth|jwt|key)=",
    re.I,
)


def holds_secret(address: str) -> bool:
    """True if the address may hold a secret: a user, parameter or fragment of a web server's, of which any may be a
    token; a password of a database, or a parameter of it that is named like a secret. A user of a database without a
    password is none."""
    address = address.strip()
    if WEB.match(address):
        place, _, fragment = address.partition("#")
        parameters = {name for name, _ in parse_qsl(place.partition("?")[2], keep_blank_values=True)}
        return "@" in address or bool(fragment or parameters - HARMLESS)
    _, has_place, rest = address.partition("://")
    place, has_user, _ = rest.rpartition("@")  # a password may hold any character, unquoted
    has_password = bool(has_place and has_user and not rest.startswith("/") and ":" in place)
    return has_password or bool(PARAMETER.search(unquote(unquote(address))))


def key_in(name: str, environment: Mapping[str, str] = os.environ) -> str:
    """The key in the environment variable `name`, without white space around it; "" if it is not set, or empty. Raises
    ConfigError, which does not show it, if it is blank, or has characters with which a client's error might show it."""
    value = environment.get(name, "")
    key = value.strip()
    if value and not key:
        raise ConfigError(f"{name} holds nothing but white space: set it to the key, or unset it")
    if not (key.isascii() and key.isprintable()) or set(key) & set(" \"'\\"):
        raise ConfigError(
            f"the value of {name} has a space, quote, backslash, control or non-ASCII character in it, with which an "
            "error message might show it; set it to the key alone"
        )
    return key


def is_web_address(address: str) -> bool:
    """True for http:// or https:// with a host and, if there is one, a port from 1 to 65535, without white space."""
    try:
        parts = urlsplit(address)
        is_one = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
    return is_one and address.isprintable() and " " not in address


def keys_with_secrets(values: Any, key: str = "") -> Iterator[str]:
    """Keys, as `rewards.0.args.url`, of the texts among nested values and keys that are an address with a
    secret."""
    if isinstance(values, str):
        if ADDRESS.fullmatch(values.strip()) and holds_secret(values):
            yield key
    elif isinstance(values, Mapping):
        for name, value in values.items():
            yield from keys_with_secrets(name, f"a key of {key}")
            yield from keys_with_secrets(value, f"{key}.{name}".lstrip("."))
    elif isinstance(values, Sequence):
        for place, value in enumerate(values):
            yield from keys_with_secrets(value, f"{key}.{place}")
