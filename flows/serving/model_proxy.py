"""One address in front of a model's servers: when another version becomes the one to serve, requests go to its server
as soon as that is ready, and none is lost."""

from __future__ import annotations

import asyncio
import hmac
import json
import signal
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from aiohttp import ClientError, ClientSession, ClientTimeout, DummyCookieJar, TCPConnector, hdrs, web
from multidict import CIMultiDict

from flows.serving.children import describe_end, last_error
from flows.serving.model_server import Server, Version, as_evaluated, end_server, remove_copy
from grpo_core.errors import GrpoError

ASK_SECONDS = 5.0  # between two questions which version is to be served, and between two starts of one that fails
ENDING_SECONDS = 5.0  # that requests have when serving ends
READY_SECONDS = 0.2  # between two looks at a server that starts, runs or ends
COMPLETING = ("/v1/completions", "/v1/chat/completions")
# What is passed on. Other paths of vLLM answer without the evaluation's sampling, or change the server.
PASSED_ON = dict.fromkeys((*COMPLETING, "/tokenize", "/detokenize"), "POST") | {"/v1/models": "GET", "/metrics": "GET"}
OF_CONNECTION = {"host", "content-length", "transfer-encoding", "connection", "keep-alive", "upgrade", "expect"}
OF_CONNECTION |= {"authorization", "date", "server"}
KEPT_SECONDS = 2.0  # that a connection waits for its next request: less than the 5 after which vLLM's server closes it
NOT_OURS = (hdrs.ACCEPT, hdrs.ACCEPT_ENCODING, hdrs.CONTENT_TYPE, hdrs.USER_AGENT)  # headers that only clients set


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
    failed: str = ""  # number of the version whose server did not start last
    said: str = ""


def serve_front(front: Front, host: str, port: int) -> None:
    """Serve until SIGINT or SIGTERM; ends the servers. Raises ServerEndedError if the first server does not start."""

    async def until_told_to_end() -> None:
        task = asyncio.current_task()
        assert task
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        await run_front(front, host, port)

    with suppress(asyncio.CancelledError):
        asyncio.run(until_told_to_end())


async def run_front(front: Front, host: str, port: int) -> None:
    """Serve until it is cancelled; ends the servers. Raises ServerEndedError if the first server does not start."""
    background: set[asyncio.Future[None]] = set()
    async with ClientSession(
        connector=TCPConnector(limit=0, keepalive_timeout=KEPT_SECONDS),
        timeout=ClientTimeout(),
        cookie_jar=DummyCookieJar(),
        skip_auto_headers=NOT_OURS,
        auto_decompress=False,
    ) as client:

        async def health(request: web.Request) -> web.Response:
            if front.current is None or not front.is_ready.is_set():
                return web.json_response({"status": "starting"}, status=503)
            version = front.current.version
            return web.json_response({"status": "ready", "model": version.name, "version": version.number})

        async def forward(request: web.Request) -> web.StreamResponse:
            return await _forward(front, client, request)

        app = web.Application(client_max_size=0)  # no limit: the server says what is too long
        app.add_routes([web.get("/health", health)])
        app.add_routes([web.route(method, path, forward) for path, method in PASSED_ON.items()])
        # A client that goes away cancels its handler, and with it the request to the server, which stops sampling.
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=ENDING_SECONDS)
        await runner.setup()
        try:
            await web.TCPSite(runner, host, port).start()
            await _follow(front, client, background)
        finally:
            await runner.cleanup()
            await asyncio.gather(*(asyncio.to_thread(end_server, each) for each in front.running))


async def _forward(front: Front, client: ClientSession, request: web.Request) -> web.StreamResponse:
    """A server's answer, part by part as it comes."""
    given = request.headers.get(hdrs.AUTHORIZATION, "").encode(errors="surrogateescape")
    if front.key and not hmac.compare_digest(given, f"Bearer {front.key}".encode()):
        return web.json_response({"error": {"message": "the key is missing or wrong", "code": 401}}, status=401)
    body = await request.read()
    await front.is_ready.wait()
    target = front.current
    assert target
    target.in_flight += 1
    begun: web.StreamResponse | None = None
    try:
        if request.path in COMPLETING:
            body = _filled_in(target.version, body)
        headers = _passed_on(request.headers)
        headers[hdrs.AUTHORIZATION] = f"Bearer {target.secret}"
        url = f"{target.url}{request.path}"  # one of PASSED_ON
        async with client.request(request.method, url, headers=headers, data=body, allow_redirects=False) as answer:
            kept = _passed_on(answer.headers)
            if answer.content_length is not None:
                return web.Response(body=await answer.read(), status=answer.status, headers=kept)
            begun = web.StreamResponse(status=answer.status, headers=kept)
            await begun.prepare(request)
            async for part in answer.content.iter_any():
                await begun.write(part)
            await begun.write_eof()
            return begun
    except ClientError as error:
        if begun and begun.prepared:  # what the client has is cut off, and is not to look whole
            assert request.transport
            request.transport.abort()
            return begun
        said = f"{target.child.name} does not answer: {error!r}"
        return web.json_response({"error": {"message": said, "code": 502}}, status=502)
    finally:
        target.in_flight -= 1


def _passed_on(headers: Mapping[str, str]) -> CIMultiDict[str]:
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in OF_CONNECTION)


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


async def _follow(front: Front, client: ClientSession, background: set[asyncio.Future[None]]) -> None:
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


async def _start_again(front: Front, ended: Server, client: ClientSession) -> None:
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


async def _switch(front: Front, version: Version, client: ClientSession, background: set[asyncio.Future[None]]) -> None:
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


async def _started(front: Front, version: Version, client: ClientSession) -> Server:
    """Start a version's server and wait until it is ready. Raises ServerEndedError if it ends before."""
    server = await asyncio.to_thread(front.start, version)
    front.running.append(server)
    headers = {"Authorization": f"Bearer {server.secret}"}
    while server.child.process.poll() is None:
        with suppress(ClientError):
            async with client.get(f"{server.url}/health", headers=headers) as answer:
                if answer.ok:
                    return server
        await asyncio.sleep(READY_SECONDS)
    front.running.remove(server)
    raise ServerEndedError(f"{describe_end(server.child)}: {last_error(server.child)} ({server.child.log})")
