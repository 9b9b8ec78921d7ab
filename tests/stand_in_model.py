"""A server of a model that repeats what it was asked, with its own name: `python -m tests.stand_in_model NAME PORT`."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route


async def health(request: Request) -> Response:
    return Response()


async def answer(request: Request) -> Response:
    asked: dict[str, Any] = await request.json()
    if not asked.get("stream"):
        await asyncio.sleep(asked.get("seconds", 0.0))
        return JSONResponse({"served_by": sys.argv[1], "asked": asked})

    async def parts() -> AsyncIterator[bytes]:
        for number in range(3):
            yield f"data: {sys.argv[1]} {number}\n\n".encode()
            await asyncio.sleep(asked.get("seconds", 0.0))

    return StreamingResponse(parts(), media_type="text/event-stream")


if __name__ == "__main__":
    if sys.argv[1] == "broken":
        sys.exit("RuntimeError: no memory is left")
    routes = [Route("/health", health), Route("/v1/{path:path}", answer, methods=["POST"])]
    uvicorn.run(Starlette(routes=routes), host="127.0.0.1", port=int(sys.argv[2]), log_level="warning")
