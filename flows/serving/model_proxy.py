"""One address in front of a model's servers: when another version becomes the one to serve, requests go to its server
as soon as that is ready, and none is lost."""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import httpx2
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from flows.serving.children import describe_end, last_error
from flows.serving.model_server import Server, Version, as_evaluated, end_server
from grpo_core.errors import GrpoError

ASK_SECONDS = 5.0  # between two questions which version is to be served
READY_SECONDS = 0.2  # between two looks at a server that starts or ends
COMPLETING = ("/v1/completions", "/v1/chat/completions")
OF_CONNECTION = {b"host", b"content-length", b"transfer-encoding", b"connection", b"authorization"}


class ServerEndedError(GrpoError):
    """A version's server has ended before it was ready."""


@dataclass
class Front:
    """What is served. `current`: the server that requests go to; they wait until there is one.

    start: starts a version's server. wanted: gives the version to serve, or None if it is `current`'s. say: tells a
    person. key: that requests must have, if any. restart: the old server ends before the new one starts. once: called
    when the first version is served; then serving ends.
    """

    start: Callable[[Version], Server]
    wanted: Callable[[Server | None], Version | None]
    say: Callable[[str], None]
    key: str = ""
    restart: bool = False
    once: Callable[[], None] | None = None
    current: Server | None = None
    is_ready: asyncio.Event = field(default_factory=asyncio.Event)
    failure: BaseException | None = None


class _Forwarded(StreamingResponse):
    """A server's answer, part by part as it comes."""

    def __init__(self, answer: httpx2.Response, end: Callable[[], None]):
        kept = {name: value for name, value in answer.headers.items() if name.lower().encode() not in OF_CONNECTION}
        super().__init__(answer.aiter_raw(), answer.status_code, kept)
        self.end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:  # also where the client has gone
            self.end()


def serve_front(front: Front, host: str, port: int) -> None:
    """Serve until a signal; ends the servers. Raises ServerEndedError if the first server does not start."""
    client = httpx2.AsyncClient(timeout=None, limits=httpx2.Limits(max_connections=None), verify=False, trust_env=False)

    async def health(request: Request) -> Response:
        if front.current is None:
            return JSONResponse({"status": "starting"}, status_code=503)
        version = front.current.version
        return JSONResponse({"status": "ready", "model": version.name, "version": version.number})

    async def forward(request: Request) -> Response:
        if front.key and not hmac.compare_digest(request.headers.get("authorization", ""), f"Bearer {front.key}"):
            return JSONResponse({"error": {"message": "the key is missing or wrong", "code": 401}}, status_code=401)
        body = await request.body()
        await front.is_ready.wait()
        target: Server = _current(front)
        target.in_flight += 1
        try:
            if request.method == "POST" and request.url.path in COMPLETING:
                body = _filled_in(target.version, body)
            headers = [(name, value) for name, value in request.headers.raw if name.lower() not in OF_CONNECTION]
            url = httpx2.URL(target.url).join(str(request.url.replace(scheme="", netloc="")))
            sent = client.build_request(request.method, url, headers=headers, content=body)
            answer = await client.send(sent, stream=True)
        except BaseException as error:
            target.in_flight -= 1
            if isinstance(error, httpx2.HTTPError):
                said = f"{target.child.name} does not answer: {error!r}"
                return JSONResponse({"error": {"message": said, "code": 502}}, status_code=502)
            raise

        def end() -> None:
            target.in_flight -= 1
            closing.add(task := asyncio.ensure_future(answer.aclose()))
            task.add_done_callback(closing.discard)

        return _Forwarded(answer, end)

    closing: set[asyncio.Future[None]] = set()

    @asynccontextmanager
    async def following(app: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(_follow(front, client))
        task.add_done_callback(lambda _: setattr(server, "should_exit", True))
        yield
        task.cancel()
        [front.failure] = await asyncio.gather(task, return_exceptions=True)
        await client.aclose()
        if front.current:
            await asyncio.to_thread(end_server, front.current)

    routes = [Route("/health", health), Route("/{path:path}", forward, methods=["GET", "POST"])]
    app = Starlette(routes=routes, lifespan=following)
    server = uvicorn.Server(uvicorn.Config(app, host, port, log_level="warning", timeout_graceful_shutdown=5))
    server.run()
    if isinstance(front.failure, Exception):
        raise front.failure


def _current(front: Front) -> Server:
    assert front.current is not None
    return front.current


def _filled_in(version: Version, body: bytes) -> bytes:
    try:
        asked = json.loads(body)
    except ValueError:
        return body  # the server says what is wrong
    return json.dumps(as_evaluated(version, asked)).encode() if isinstance(asked, dict) else body


async def _follow(front: Front, client: httpx2.AsyncClient) -> None:
    """Serve the version that is wanted, again and again. Raises an error only before anything is served."""
    while True:
        try:
            version = await asyncio.to_thread(front.wanted, front.current)
            if version is None and front.current and front.current.child.process.poll() is not None:
                front.say(f"{describe_end(front.current.child)}: it is started again")
                version = front.current.version
                front.is_ready.clear()
                front.current = None
            if version is not None:
                await _switch(front, version, client)
            if front.once:
                await asyncio.to_thread(front.once)
                return
        except GrpoError as error:
            if front.current is None or front.once:
                raise
            front.say(f"{error}. Version {front.current.version.number} is served as before")
        await asyncio.sleep(ASK_SECONDS)


async def _switch(front: Front, version: Version, client: httpx2.AsyncClient) -> None:
    """Serve another version. If both servers do not fit into memory, wait for a moment without requests."""
    old, new = front.current, None
    if old is None or not front.restart:
        try:
            new = await _started(front, version, client)
        except ServerEndedError as error:
            if old is None:
                raise
            front.say(f"{error}. Perhaps two do not fit: it is tried again alone when no request is in flight")
            await _idle(old)
    if new is None and old is not None:
        front.is_ready.clear()
        await _idle(old)
        await asyncio.to_thread(end_server, old)
        front.current = None
        try:
            new = await _started(front, version, client)
        except ServerEndedError:
            front.current = await _started(front, old.version, client)
            front.is_ready.set()
            raise
    front.current = new
    front.is_ready.set()
    front.say(f"serving {version.name} version {version.number}")
    if old is not None:
        await _idle(old)
        await asyncio.to_thread(end_server, old)


async def _idle(server: Server) -> None:
    while server.in_flight:
        await asyncio.sleep(READY_SECONDS)


async def _started(front: Front, version: Version, client: httpx2.AsyncClient) -> Server:
    """Start a version's server and wait until it is ready. Raises ServerEndedError if it ends before."""
    server = await asyncio.to_thread(front.start, version)
    try:
        while True:
            if server.child.process.poll() is not None:
                raise ServerEndedError(f"{describe_end(server.child)}: {last_error(server.child)} ({server.child.log})")
            with suppress(httpx2.HTTPError):
                if (await client.get(f"{server.url}/health")).is_success:
                    return server
            await asyncio.sleep(READY_SECONDS)
    except BaseException:
        end_server(server)
        raise
