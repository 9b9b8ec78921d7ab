"""Which of several vLLM servers is asked: the least loaded that is up; for further completions of a prompt, the same
while it has room; for a later turn of a conversation, the first turn's, which has cached it.

Requests wait here until a server has room for them. What the training waits for goes first.

A server that fails is left out: what was asked of it is asked of another, with the same seeds, so that the answers stay
the same. Meanwhile it is brought back, and then gets work again. Everything here runs in one event loop.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from grpo_core.errors import EngineError
from grpo_core.rollout.vllm import client
from grpo_core.rollout.vllm.client import Server, Unavailable

POLL_SECONDS = 0.5
ATTEMPTS = 5  # at one answer, by one server after the other

Result = TypeVar("Result")


@dataclass(order=True)
class _Waiting:
    """A request for one completion. `prefix`: equal for those that begin alike; `waits`: for the server that has that
    prefix, however busy it is."""

    priority: int
    number: int  # in the order of arrival
    prefix: int = field(compare=False)
    waits: bool = field(compare=False)
    failed: set[Server] = field(compare=False, default_factory=set)
    server: asyncio.Future[Server] = field(compare=False, init=False)


class Router:
    """Servers as one. `seconds`: how long none may be available; `first`: the server that gets the first request;
    `reports`: whether lines about servers that leave and come back are printed."""

    def __init__(self, servers: Sequence[Server], seconds: float, first: int, *, reports: bool):
        self.servers, self.seconds, self.reports = servers, seconds, reports
        first %= len(servers)
        self.order = [*servers[first:], *servers[:first]]  # among servers with equal load
        self.homes: dict[int, Server] = {}  # of the prefixes since the last weights, which empty the caches
        self.numbers = itertools.count()
        self.waiting: list[_Waiting] = []  # a heap
        self.bringing_back: dict[Server, asyncio.Task[None]] = {}
        self.none_since = 0.0  # when the last server that was up was left out

    @property
    def up(self) -> list[Server]:
        return [server for server in self.order if not server.problem]

    async def complete(
        self, body: Mapping[str, Any], oldest: int, conversation: int | None = None
    ) -> list[dict[str, Any]]:
        """The completion of a request, every token of it by weights of version `oldest` or later.

        Raises EngineError when no server is available for too long, or the only one refuses or hangs.
        """
        prefix = hash(tuple(body["token_ids"])) if conversation is None else conversation
        # Asked again, it keeps its place.
        request = _Waiting(body.get("priority", 0), next(self.numbers), prefix, conversation is not None)
        failure = ""
        for _ in range(ATTEMPTS):
            server = await self._room(request)
            try:
                return await server.complete(body, oldest)
            except (Unavailable, EngineError) as error:
                failure = f"{server.url}: {error}"
                request.failed.add(server)
                self._fail(server, error)
            finally:
                self._free(server)
        raise EngineError(f"{ATTEMPTS} attempts at one answer have failed; the last: {failure}")

    async def each(self, work: Callable[[Server], Awaitable[Result]]) -> list[Result]:
        """What comes of this work at each server that is up, at least at one."""
        while True:
            asked = self.up
            found = await asyncio.gather(*map(work, asked), return_exceptions=True)
            for server, result in zip(asked, found, strict=True):
                if isinstance(result, BaseException):
                    self._fail(server, result)
            if done := [result for result in found if not isinstance(result, BaseException)]:
                return done
            await self.until_one_is_up()

    async def connect(self) -> None:
        """Take every server for this trainer; one that is not up yet is left out. Raises EngineError if one cannot be
        used."""
        leases = await asyncio.gather(*(server.take_lease() for server in self.servers), return_exceptions=True)
        if refusals := [error for error in leases if error is not None and not isinstance(error, Unavailable)]:
            raise refusals[0]
        for server, error in zip(self.servers, leases, strict=True):
            if error is not None:
                self._leave_out(server, error)

    async def hand_over(self, numbers: Iterable[int]) -> list[int]:
        """Bring the wanted weights to these servers, and leave out the others, until one has them. Returns which
        servers have."""
        self.homes.clear()
        chosen = [self.servers[number] for number in numbers]
        for server in self.servers:
            if server not in chosen and not server.problem:
                self._leave_out(server, Unavailable("it has not got the weights"))
        await asyncio.gather(*map(self._restore, chosen))
        await self.until_one_is_up()
        return [number for number, server in enumerate(self.servers) if not server.problem]

    async def until_one_is_up(self) -> None:
        """Raises EngineError when that takes too long."""
        while not self.up:
            if hopeless := self._hopeless():
                raise EngineError(hopeless)
            await asyncio.sleep(POLL_SECONDS)

    async def keep(self, server: Server) -> None:
        """Renew the lease, for ever; a server that is away, or was started again, is left out and brought back."""
        while True:
            await asyncio.sleep(client.LEASE_SECONDS / client.RENEWALS)
            try:
                await server.take_lease()
                if not server.problem and server.wanted.version and not server.restoring.locked():
                    async with server.restoring:
                        await server.bring_up_to_date()
            except Exception as error:  # whatever it is, the lease must not lapse
                if not server.problem and server.wanted.version and not server.restoring.locked():
                    self._leave_out(server, error)
                    if self.up:
                        server.abandon("it does not answer")

    def stop(self) -> None:
        """Bring no server back any more."""
        for task in self.bringing_back.values():
            task.cancel()

    async def _room(self, request: _Waiting) -> Server:
        """The server for a request, as soon as one has room; `_free` gives the room back."""
        request.server = found = asyncio.get_running_loop().create_future()
        heapq.heappush(self.waiting, request)
        self._assign()
        try:
            return await found
        except asyncio.CancelledError:
            if found.done() and not found.cancelled() and not found.exception():
                self._free(found.result())
            raise

    def _free(self, server: Server) -> None:
        server.in_flight -= 1
        self._assign()

    def _assign(self) -> None:
        """Give the requests that wait to servers that have room: the urgent ones first, then by their arrival."""
        passed_over = []
        while self.waiting and any(server.has_room for server in self.up):
            request = heapq.heappop(self.waiting)
            if request.server.done():
                continue
            # One that fails a request quickly is the least loaded: another is waited for.
            fit = [server for server in self.up if server not in request.failed] or self.up
            free = [server for server in fit if server.has_room]
            home = self.homes.get(request.prefix)
            if home in fit and (home.has_room or request.waits):
                free = [home] * home.has_room
            if not free:
                passed_over.append(request)
                continue
            server = min(free, key=lambda server: server.in_flight / server.capacity)
            self.homes[request.prefix] = server
            server.in_flight += 1
            request.server.set_result(server)
        for request in passed_over:
            heapq.heappush(self.waiting, request)

    def _fail(self, server: Server, error: BaseException) -> None:
        """Leave out a server that has failed. Raises the error if waiting does not mend it and there is no other."""
        others = any(other is not server for other in self.up)
        if not isinstance(error, Unavailable) and not (isinstance(error, EngineError) and others):
            raise error
        self._leave_out(server, error)

    def _leave_out(self, server: Server, error: BaseException) -> None:
        was_up, server.refuses = not server.problem, isinstance(error, EngineError)
        server.problem = str(error) if isinstance(error, Unavailable | EngineError) else repr(error)
        if was_up:
            if not self.up:
                self.none_since = asyncio.get_running_loop().time()
            self._report(f"is left out: {server.problem}", server)
            if server not in self.bringing_back or self.bringing_back[server].done():
                self.bringing_back[server] = asyncio.create_task(self._bring_back(server))

    async def _bring_back(self, server: Server) -> None:
        while server.problem:
            await self._restore(server)
            if hopeless := self._hopeless():
                for request in self.waiting:
                    if not request.server.done():
                        request.server.set_exception(EngineError(hopeless))
                self.waiting.clear()
            if server.problem:
                await asyncio.sleep(POLL_SECONDS)

    async def _restore(self, server: Server) -> None:
        """One attempt at having the server up with the wanted weights."""
        try:
            await server.restore()
        except Exception as error:  # what is not foreseen, too, is said when no server is left
            self._leave_out(server, error)
        else:
            if server.problem:
                server.problem = ""
                self._report("is back", server)
            self._assign()

    def _hopeless(self) -> str:
        """Why there is no server, if waiting for one is over; otherwise ""."""
        if self.up or any(server.receiving for server in self.servers):
            return ""
        if all(server.refuses for server in self.servers):
            return "; ".join(server.problem for server in self.servers)
        if asyncio.get_running_loop().time() < self.none_since + self.seconds:
            return ""
        reasons = "; ".join(f"{server.url}: {server.problem}" for server in self.servers)
        return (
            f"vLLM servers not available for {self.seconds:g} s (rollout.vllm_server_timeout): {reasons}. Start one "
            "again, then this run: it goes on from its last checkpoint"
        )

    def _report(self, what: str, server: Server) -> None:
        if self.reports:
            print(
                f"the vLLM server at {server.url} {what} ({len(self.up)} of {len(self.servers)} sample now)", flush=True
            )
