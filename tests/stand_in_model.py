"""A server of a model that repeats what it was asked, with its own name: `python -m tests.stand_in_model NAME PORT`."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from grpo_core.rollout.vllm.secret_required import SecretRequired


async def health(request: Request) -> Response:
    return Response()


async def answer(request: Request) -> Response:
    asked: dict[str, Any] = await request.json()
    if not asked.get("stream"):
        await asyncio.sleep(asked.get("seconds", 0.0))
        await _until(asked)
        return JSONResponse({"served_by": sys.argv[1], "asked": asked})

    async def parts() -> AsyncIterator[bytes]:
        for number in range(3):
            yield f"data: {sys.argv[1]} {number}\n\n".encode()
            await _until(asked)

    return StreamingResponse(parts(), media_type="text/event-stream")


async def _until(asked: dict[str, Any]) -> None:
    """Until a file is there, if one is named."""
    while "until" in asked and not Path(asked["until"]).exists():
        await asyncio.sleep(0.02)


if __name__ == "__main__":
    if sys.argv[1] == "broken":
        sys.exit("RuntimeError: no memory is left")
    routes = [Route("/health", health), Route("/v1/{path:path}", answer, methods=["POST"])]
    uvicorn.run(
        Starlette(routes=routes, middleware=[Middleware(SecretRequired)]),
        host="127.0.0.1",
        port=int(sys.argv[2]),
        log_level="warning",
        timeout_graceful_shutdown=0,
    )
