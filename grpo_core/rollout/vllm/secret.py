"""The secret that a vLLM server and its trainer share: the server refuses every request without it.

vLLM's own `--api-key` guards neither weights nor the workers' methods.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

SECRET = "GRPO_VLLM_SECRET"  # environment variable, of the server and of the trainer


def with_secret(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Headers of a request to a server that has the secret of this environment; none without one."""
    return {"Authorization": f"Bearer {secret}"} if (secret := environment.get(SECRET)) else {}


class SecretRequired:
    """ASGI middleware: answers status 401 to every request and websocket that lacks the secret of this process."""

    def __init__(self, app: ASGIApp):
        self.app, self.wanted = app, f"Bearer {os.environ[SECRET]}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = "" if scope["type"] == "lifespan" else Headers(scope=scope).get("authorization", "")
        if scope["type"] == "lifespan" or secrets.compare_digest(given.encode(), self.wanted):
            await self.app(scope, receive, send)
        else:
            answer = PlainTextResponse(f"This server wants the secret that it was started with ({SECRET})\n", 401)
            await answer(scope, receive, send)
