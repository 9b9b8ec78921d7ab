"""One address in front of a model's servers: when another version becomes the one to serve, requests go to its server
as soon as that is ready, and none is lost."""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import httpx2
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from flows.serving.children import describe_end, last_error
from flows.serving.model_server import Server, Version, as_evaluated, end_server, remove_copy
from grpo_core.errors import GrpoError

ASK_SECONDS = 5.0  # between two questions which version is to be served, and between two starts of one that fails
READY_SECONDS = 0.2  # between two looks at a server that starts, runs or ends
COMPLETING = ("/v1/completions", "/v1/chat/completions")
# What is passed on. Other paths of vLLM answer without the evaluation's sampling, or change the server.
PASSED_ON = dict.fromkeys((*COMPLETING, "/tokenize", "/detokenize"), "POST") | {"/v1/models": "GET", "/metrics": "GET"}
OF_CONNECTION = {b"host", b"content-length", b"transfer-encoding", b"connection", b"authorization", b"date", b"server"}


class ServerEndedError(GrpoError):
    """A version's server has ended before it was ready."""


@dataclass
class Front:
    """What is served. `current`: the server that requests go to; they wait until it is ready.

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
    running: list[Server] = field(default_factory=list)  # and those that start or end
    is_ready: asyncio.Event = field(default_factory=asyncio.Event)
    failure: BaseException | None = None
    failed: str = ""  # number of the version whose server did not start last
    said: str = ""


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
    background: set[asyncio.Future[None]] = set()

    async def health(request: Request) -> Response:
        if front.current is None or not front.is_ready.is_set():
            return JSONResponse({"status": "starting"}, status_code=503)
        version = front.current.version
        return JSONResponse({"status": "ready", "model": version.name, "version": version.number})

    async def forward(request: Request) -> Response:
        given = request.headers.get("authorization", "").encode()
        if front.key and not hmac.compare_digest(given, f"Bearer {front.key}".encode()):
            return JSONResponse({"error": {"message": "the key is missing or wrong", "code": 401}}, status_code=401)
        body = await request.body()
        await front.is_ready.wait()
        if await request.is_disconnected():
            return Response(status_code=499)
        target: Server = _current(front)
        target.in_flight += 1
        if request.url.path in COMPLETING:
            body = _filled_in(target.version, body)
        headers = [(name, value) for name, value in request.headers.raw if name.lower() not in OF_CONNECTION]
        headers.append((b"authorization", f"Bearer {target.secret}".encode()))
        url = f"{target.url}{request.url.path}"  # one of PASSED_ON
        sent = client.build_request(request.method, url, headers=headers, content=body)
        sending, leaving = asyncio.ensure_future(client.send(sent, stream=True)), asyncio.ensure_future(_left(request))
        try:
            await asyncio.wait([sending, leaving], return_when=asyncio.FIRST_COMPLETED)
            if not sending.done():  # the server stops sampling for a client that has gone
                sending.cancel()
                target.in_flight -= 1
                return Response(status_code=499)
            answer = sending.result()
        except BaseException as error:
            sending.cancel()
            target.in_flight -= 1
            if isinstance(error, httpx2.HTTPError):
                said = f"{target.child.name} does not answer: {error!r}"
                return JSONResponse({"error": {"message": said, "code": 502}}, status_code=502)
            raise
        finally:
            leaving.cancel()

        def end() -> None:
            target.in_flight -= 1
            _keep(background, answer.aclose())

        return _Forwarded(answer, end)

    @asynccontextmanager
    async def following(app: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(_follow(front, client, background))
        task.add_done_callback(lambda _: setattr(server, "should_exit", True))
        yield
        task.cancel()
        [front.failure] = await asyncio.gather(task, return_exceptions=True)
        await client.aclose()
        await asyncio.gather(*(asyncio.to_thread(end_server, each) for each in front.running))

    routes = [Route("/health", health), *(Route(path, forward, methods=[each]) for path, each in PASSED_ON.items())]
    app = Starlette(routes=routes, lifespan=following)
    server = uvicorn.Server(uvicorn.Config(app, host, port, log_level="warning", timeout_graceful_shutdown=5))
    server.run()
    if isinstance(front.failure, Exception):
        raise front.failure


def _current(front: Front) -> Server:
    assert front.current is not None
    return front.current


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _keep(background: set[asyncio.Future[None]], work: Coroutine[Any, Any, None]) -> None:
    """Do the work beside everything else."""
    background.add(task := asyncio.ensure_future(work))
    task.add_done_callback(background.discard)


def _filled_in(version: Version, body: bytes) -> bytes:
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError):
        return body  # the server says what is wrong
    return json.dumps(as_evaluated(version, asked)).encode() if isinstance(asked, dict) else body


async def _follow(front: Front, client: httpx2.AsyncClient, background: set[asyncio.Future[None]]) -> None:
    """Serve the version that is wanted, again and again. Raises an error only before anything is served."""
    next_question = 0.0
    while True:
        try:
            if front.current and front.current.child.process.poll() is not None:
                await _start_again(front, front.current, client)
            if time.monotonic() >= next_question:
                next_question = time.monotonic() + ASK_SECONDS
                version = await asyncio.to_thread(front.wanted, front.current)
                if version is not None and version.number != front.failed:
                    await _switch(front, version, client, background)
            if front.once:
                await asyncio.to_thread(front.once)
                return
        except Exception as error:  # of whatever kind: what is served goes on
            if front.current is None or front.once:
                raise
            _say_once(front, f"{error}. Version {front.current.version.number} is served as before")
        await asyncio.sleep(READY_SECONDS)


def _say_once(front: Front, text: str) -> None:
    if text != front.said:
        front.say(text)
    front.said = text


async def _start_again(front: Front, ended: Server, client: httpx2.AsyncClient) -> None:
    """Start the server of the version that is served once more, as often as it takes. Requests wait."""
    front.is_ready.clear()
    _say_once(front, f"{describe_end(ended.child)}: it is started again")
    front.running.remove(ended)
    while True:
        try:
            front.current = await _started(front, ended.version, client)
        except ServerEndedError as error:
            _say_once(front, f"{error}: it is started again")
            await asyncio.sleep(ASK_SECONDS)
        else:
            front.is_ready.set()
            return


async def _switch(
    front: Front, version: Version, client: httpx2.AsyncClient, background: set[asyncio.Future[None]]
) -> None:
    """Serve another version. If both servers do not fit into memory, wait for a moment without requests. Raises
    ServerEndedError if its server does not start: the old one serves."""
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
        await _end(front, old)
        try:
            new = await _started(front, version, client)
        except ServerEndedError:
            front.failed = version.number
            front.running.append(old)  # which has ended, and is started again
            await _start_again(front, old, client)
            raise
        remove_copy(old.version)
        old = None
    front.current, front.failed = new, ""
    front.is_ready.set()
    front.say(f"serving {version.name} version {version.number}")
    if old is not None:
        _keep(background, _drain(front, old))


async def _drain(front: Front, server: Server) -> None:
    await _idle(server)
    await _end(front, server)
    remove_copy(server.version)


async def _end(front: Front, server: Server) -> None:
    await asyncio.to_thread(end_server, server)
    front.running.remove(server)


async def _idle(server: Server) -> None:
    while server.in_flight:
        await asyncio.sleep(READY_SECONDS)


async def _started(front: Front, version: Version, client: httpx2.AsyncClient) -> Server:
    """Start a version's server and wait until it is ready. Raises ServerEndedError if it ends before."""
    server = await asyncio.to_thread(front.start, version)
    front.running.append(server)
    headers = {"Authorization": f"Bearer {server.secret}"}
    while server.child.process.poll() is None:
        with suppress(httpx2.HTTPError):
            if (await client.get(f"{server.url}/health", headers=headers)).is_success:
                return server
        await asyncio.sleep(READY_SECONDS)
    front.running.remove(server)
    raise ServerEndedError(f"{describe_end(server.child)}: {last_error(server.child)} ({server.child.log})")
