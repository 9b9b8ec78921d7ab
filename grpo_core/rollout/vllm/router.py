"""Choice among several vLLM servers: the least loaded that is up; for further completions of a prompt, the same while
it has room; for a later turn of a conversation, the first turn's, which has cached it.

Requests wait here until a server has room for them. What the training waits for goes first.

A server that fails is left out: another is asked for its answers, with the same seeds, so that they stay the same.
Meanwhile it is brought back, and then gets work again. Everything here runs in one event loop.

The main process alone leases servers, looks whether they answer and sends weights; it tells the others what it finds
(`states`), so that servers are asked as often whatever the number of processes.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from grpo_core.errors import EngineError
from grpo_core.rollout.vllm import client
from grpo_core.rollout.vllm.client import Server, Unavailable
from grpo_core.rollout.waiting import ATTEMPTS

POLL_SECONDS = 0.5

Result = TypeVar("Result")
States = list[tuple[str, int]]  # of each server: why it is left out, "" if it is up; and its `room`


@dataclass(order=True)
class _Waiting:
    """A request for one completion. `prefix`: equal for requests that begin alike; `waits`: whether it waits for the
    server that has that prefix, however busy."""

    priority: int
    number: int  # in the order of arrival
    prefix: int = field(compare=False)
    waits: bool = field(compare=False)
    failed: set[Server] = field(compare=False, default_factory=set)
    server: asyncio.Future[Server] = field(compare=False, init=False)


class Router:
    """Several servers used as one. `seconds`: longest time without an available one; `first`: the server that gets the
    first request; `reports`: whether to print lines about servers that leave and come back; `sender`: a
    `send_weights.Sender`, which is told what servers get weights together."""

    def __init__(self, servers: Sequence[Server], seconds: float, first: int, *, reports: bool, sender: Any):
        self.servers, self.seconds, self.reports, self.sender = servers, seconds, reports, sender
        first %= len(servers)
        self.order = [*servers[first:], *servers[:first]]  # among servers with equal load
        self.homes: dict[int, Server] = {}  # by prefix, since the last weights, which empty the caches
        self.numbers = itertools.count()
        # Heaps of requests: for the server that has their prefix, or for any (None).
        self.waiting: dict[Server | None, list[_Waiting]] = {None: [], **{server: [] for server in servers}}
        self.bringing_back: dict[Server, asyncio.Task[None]] = {}
        self.none_since = 0.0  # when the last server that was up was left out
        self.away: set[Server] = set()  # those that the main process has left out, in the others

    @property
    def states(self) -> States:
        return [(server.problem, server.room) for server in self.servers]

    @property
    def up(self) -> list[Server]:
        return [server for server in self.order if not server.problem]

    async def complete(
        self, body: Mapping[str, Any], oldest: int, conversation: int | None = None
    ) -> list[dict[str, Any]]:
        """Return the completion of a request, every token of it by weights of version `oldest` or later.

        Raises EngineError if no server is available for too long, or if the only one refuses or hangs.
        """
        prefix = hash(tuple(body["token_ids"])) if conversation is None else conversation
        # When asked again, the request keeps its place.
        request = _Waiting(body.get("priority", 0), next(self.numbers), prefix, conversation is not None)
        failure = ""
        for _ in range(ATTEMPTS):
            server = await self._take_room(request)
            try:
                return await server.complete(body, oldest)
            except (Unavailable, EngineError) as error:
                failure = f"{server.url}: {error}"
                request.failed.add(server)
                self._fail(server, error)
            finally:
                self._free(server)
        raise EngineError(f"{ATTEMPTS} attempts at one answer have failed; the last: {failure}")

    async def ask_each(self, work: Callable[[Server], Awaitable[Result]]) -> list[Result]:
        """Return the results of this work at each server that is up, at least at one."""
        while True:
            asked = self.up
            found = await asyncio.gather(*map(work, asked), return_exceptions=True)
            for server, result in zip(asked, found, strict=True):
                if isinstance(result, BaseException):
                    self._fail(server, result)
            if done := [result for result in found if not isinstance(result, BaseException)]:
                return done
            await self.wait_for_server()

    async def connect(self) -> None:
        """Lease every server for this trainer; one that is not up yet is left out. Raises EngineError if one cannot be
        used."""
        leases = await asyncio.gather(*(server.take_lease() for server in self.servers), return_exceptions=True)
        if refusals := [error for error in leases if error is not None and not isinstance(error, Unavailable)]:
            raise refusals[0]
        for server, error in zip(self.servers, leases, strict=True):
            if error is not None:
                self._leave_out(server, error)

    async def hand_over(self) -> None:
        """Bring the wanted weights to the servers that are up, until one has them."""
        self._forget_homes()
        up = self.up
        self.sender.expect(up)
        await asyncio.gather(*map(self._restore, up))
        await self.wait_for_server()

    async def adopt(self, states: States) -> None:
        """Use the servers to which the main process has brought the wanted weights, without asking them."""
        self._forget_homes()
        self._note(states)
        for server in self.servers:
            if server not in self.away:
                self._take_back(server)
        self._assign()
        await self.wait_for_server()

    async def tell(self, write: Callable[[str], None]) -> None:
        """Tell the other processes of changes of `states`, until cancelled."""
        told = ""
        while True:
            if (states := json.dumps(self.states)) != told:
                await asyncio.to_thread(write, states)
                told = states
            await asyncio.sleep(POLL_SECONDS)

    async def follow(self, read: Callable[[], str]) -> None:
        """Leave out the servers that the main process has left out, until cancelled: it notices those that hang."""
        while True:
            await asyncio.sleep(client.LEASE_SECONDS / client.RENEWALS)
            states = json.loads(await asyncio.to_thread(read) or "[]")
            if all(server.wanted.version for server in self.servers):  # no hand-over, which brings newer states
                self._note(states)

    async def wait_for_server(self) -> None:
        """Wait until a server is up. Raises EngineError if all refuse, or none is up after vllm_server_timeout."""
        while not self.up:
            if hopeless := self._hopeless():
                raise EngineError(hopeless)
            await asyncio.sleep(POLL_SECONDS)

    async def keep_lease(self, server: Server) -> None:
        """Renew the lease until cancelled; leave out a server that is away, or was started again, and bring it back.
        Weights are sent by others, since the lease has to be renewed meanwhile, and silence to be noticed."""
        while True:
            await asyncio.sleep(client.LEASE_SECONDS / client.RENEWALS)
            try:
                await server.take_lease()
                if not server.problem and server.wanted.version and not server.restoring.locked():
                    await server.check_weights()
            except Exception as error:  # whatever it is, the lease must not lapse
                if not server.problem and server.wanted.version and not server.restoring.locked():
                    self._leave_out(server, error)
                    if self.up:
                        server.abandon("it does not answer")
                elif server.receiving and not await server.answers():
                    server.abandon("it does not answer while it gets weights")

    def stop(self) -> None:
        """Stop bringing servers back."""
        for task in self.bringing_back.values():
            task.cancel()

    async def _take_room(self, request: _Waiting) -> Server:
        """Wait for a server with room for the request, and take the room; `_free` gives it back."""
        request.server = found = asyncio.get_running_loop().create_future()
        heapq.heappush(self.waiting[None], request)
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
        """Assign waiting requests to servers that have room: the urgent ones first, then by arrival."""
        passed_over = []
        while any(server.has_room for server in self.up) and (queue := self._next_queue()):
            request = heapq.heappop(queue)
            if request.server.done():
                continue
            # A server that fails requests quickly is the least loaded, so they wait for another one.
            fit = [server for server in self.up if server not in request.failed] or self.up
            free = [server for server in fit if server.has_room]
            home = self.homes.get(request.prefix)
            if home in fit and home.has_room:
                free = [home]
            elif home in fit and request.waits:
                heapq.heappush(self.waiting[home], request)
                continue
            if not free:
                passed_over.append(request)
                continue
            server = min(free, key=lambda server: server.in_flight / server.capacity)
            self.homes[request.prefix] = server
            server.in_flight += 1
            request.server.set_result(server)
        for request in passed_over:
            heapq.heappush(self.waiting[None], request)

    def _next_queue(self) -> list[_Waiting]:
        """The queue whose first request is the first of all that may be assigned; an empty one if none may."""
        may = [
            queue
            for server, queue in self.waiting.items()
            if queue and (server is None or server.problem or server.has_room)
        ]
        return min(may, key=lambda queue: queue[0], default=[])

    def _fail(self, server: Server, error: BaseException) -> None:
        """Leave out a server that has failed. Raises the error if waiting does not help and there is no other."""
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

    def _note(self, states: States) -> None:
        """Take in what the main process has found."""
        for server, (problem, room) in zip(self.servers, states, strict=False):
            server.room = room
            (self.away.add if problem else self.away.discard)(server)
            if problem and not server.problem:
                self._leave_out(server, Unavailable(problem))
                if self.up:
                    server.abandon("the main process has left it out")

    async def _bring_back(self, server: Server) -> None:
        while server.problem:
            if server not in self.away:
                await self._restore(server)
            if hopeless := self._hopeless():
                for queue in self.waiting.values():
                    for request in queue:
                        if not request.server.done():
                            request.server.set_exception(EngineError(hopeless))
                    queue.clear()
            if server.problem:
                await asyncio.sleep(POLL_SECONDS)

    async def _restore(self, server: Server) -> None:
        """Try once to have the server up with the wanted weights."""
        try:
            await server.restore()
        except Exception as error:  # unforeseen errors too are reported when no server is left
            self._leave_out(server, error)
        else:
            self._take_back(server)
            self._assign()
        finally:
            self.sender.leave(server)

    def _take_back(self, server: Server) -> None:
        if server.problem:
            server.problem = ""
            self._report("is back", server)

    def _forget_homes(self) -> None:
        """New weights have emptied the caches: no request waits for one server."""
        self.homes.clear()
        for server in self.servers:
            while self.waiting[server]:
                heapq.heappush(self.waiting[None], self.waiting[server].pop())

    def _hopeless(self) -> str:
        """Sentence on why no server is up, if waiting for one is over; otherwise ""."""
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
