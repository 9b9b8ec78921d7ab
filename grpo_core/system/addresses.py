"""Secrets in addresses: links, events, records and error messages show an address as it is."""

from __future__ import annotations

import re

PASSWORD = re.compile(r"[^:/]+://[^/@:?]*:[^@?]*@")  # also one with an unquoted / or #
PARAMETER = re.compile(r"[?&;][^=&;]*(pass(?!file)|pwd|token|secret|api_?key|credential|signature)[^=&;]*=", re.I)


def holds_secret(address: str) -> bool:
    """True if the address holds a password, a parameter named like a secret, or a user of a web server, who may be a
    token. A user of a database without a password is none."""
    user = address.lower().startswith(("http:", "https:")) and "@" in address
    return bool(user or PASSWORD.match(address) or PARAMETER.search(address))
