"""What a vLLM server that has a secret asks of every request: apart, since only such a server needs a web framework."""

from __future__ import annotations

import secrets

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from grpo_core.rollout.vllm.secret import SECRET
from grpo_core.system.addresses import key_in


class SecretRequired:
    """ASGI middleware: answers status 401 to every request and websocket that lacks the secret of this process."""

    def __init__(self, app: ASGIApp):
        self.app, self.wanted = app, f"Bearer {key_in(SECRET)}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = "" if scope["type"] == "lifespan" else Headers(scope=scope).get("authorization", "")
        if scope["type"] == "lifespan" or secrets.compare_digest(given.encode(), self.wanted):
            await self.app(scope, receive, send)
        else:
            answer = PlainTextResponse(f"This server wants the secret that it was started with ({SECRET})\n", 401)
            await answer(scope, receive, send)
