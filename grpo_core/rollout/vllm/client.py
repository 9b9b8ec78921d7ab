"""One vLLM server as its trainer needs it: up, leased to the trainer, with the right weights.

Whatever happens to it (it dies, is started again, comes back with the base's weights), `restore` brings it back.
`grpo_core.rollout.vllm.router` chooses among several servers.
"""

from __future__ import annotations

import asyncio
import functools
import json
import math
import socket
import ssl
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx2
from torch import Tensor

from grpo_core.config.rollout import RolloutConfig
from grpo_core.errors import EngineError
from grpo_core.rollout.vllm import binary
from grpo_core.rollout.vllm.secret import with_secret

LEASE_SECONDS = 20.0  # after which a trainer that was killed has lost the server
RENEWALS = 4  # per LEASE_SECONDS
CONTROL_SECONDS = 30.0  # for requests that need no work; a server that takes longer counts as down
# A connection to a machine that is off or cut off fails after 30 s, also while an answer is awaited.
SOCKET_OPTIONS = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    *((socket.IPPROTO_TCP, option, 5) for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000),
]

Result = TypeVar("Result")


@functools.cache
def certificates() -> ssl.SSLContext:
    """Read the certificates, once, since that takes longer than a request."""
    return httpx2.create_ssl_context()


class Unavailable(RuntimeError):
    """The server is down, on its way up, or has not answered in time."""


LOADED = "default"  # vLLM's name for the weights that a server has loaded by itself
OVER_BASE = "-over-base"  # suffix of the names of an adapter's weights over those
OVER_4BIT = "-over-4bit"  # suffix for an adapter over the dequantised weights of a 4-bit base


@dataclass(frozen=True)
class Weights:
    """Numbered weights. `snapshot`: the tensors, by the names that vLLM's loader knows; None in processes that do not
    send them. `checksums`: of each of these tensors as the trainer has it.

    For an adapter alone, `adapter` is peft's configuration, `base` gives the weights under it, for a server that has
    others, and `over` is the suffix of the server's name for the adapter over them.
    """

    version: int
    snapshot: Mapping[str, Tensor] | None = None
    adapter: Mapping[str, Any] | None = None
    base: Callable[[], Mapping[str, Tensor]] | None = None
    over: str = OVER_BASE
    checksums: Mapping[str, int] = field(default_factory=dict)


NO_WEIGHTS = Weights(0)  # those of a server in the middle of an update


class Server:
    """A server, and the weights that it must have: `wanted`.

    `send` brings them there and blocks until they have arrived. `objection`: sentence on why a server started with
    these options cannot be used, "" if it can. `processes`: how many share the server; `leases`: whether this one holds
    the lease for all. The router maintains `problem`, `refuses` and `in_flight`.
    """

    def __init__(
        self,
        url: str,
        config: RolloutConfig,
        token: str,
        holder: str,
        objection: Callable[[Mapping[str, Any]], str],
        send: Callable[[Server, Weights], None],
        processes: int = 1,
        *,
        leases: bool = True,
    ):
        self.url, self.token, self.holder, self.leases = url.rstrip("/"), token, holder, leases
        self.seconds = config.vllm_request_timeout
        self.objection, self.send = objection, send
        self.wanted, self.given = NO_WEIGHTS, ""  # the weights, and the version that was brought there last
        self.has_base = False  # that of the wanted weights, perhaps under another adapter
        self.backend = ""  # of the weight transfer, as the server was started
        self.transfer: Any = None  # a `send_weights.Transfer`, as long as the server's process is the same
        self.loop: asyncio.AbstractEventLoop | None = None  # in which it is asked
        self.restoring = asyncio.Lock()
        self.problem = ""  # why it gets no requests; "" if it is up and has the wanted weights
        self.refuses = False  # whether the problem will not go away by waiting
        self.receiving = False  # whether weights are on their way to it
        # `capacity`: this process's part of the completions that the server works on concurrently (`room`), by its
        # `sequences` per copy of the model: more would wait there, which counts towards its time for an answer.
        self.processes, self.sequences, self.room, self.in_flight = processes, 0, 0, 0
        self.abandoned: asyncio.Future[str] | None = None  # gets the reason why its answers are not waited for
        # One connection per request: an idle one may be closed by the server just when it is used again.
        limits = httpx2.Limits(max_keepalive_connections=0)
        transport = httpx2.AsyncHTTPTransport(verify=certificates(), limits=limits, socket_options=SOCKET_OPTIONS)
        self.http = httpx2.AsyncClient(
            base_url=self.url,
            transport=transport,
            headers=with_secret(),
            trust_env=False,  # through no proxy
        )

    @property
    def capacity(self) -> int:
        return max(math.ceil(self.room / self.processes), 1)

    @property
    def has_room(self) -> bool:
        return self.in_flight < self.capacity

    def move(self, url: str) -> None:
        """Use the address at which the server is started again; what was asked at the old one is asked again."""
        print(f"the vLLM server at {self.url} is started again at {url}", flush=True)
        self.url, self.http.base_url = url, httpx2.URL(url)
        self.abandon("it is started again at another address")

    def abandon(self, reason: str) -> None:
        """Stop waiting for answers of the server: those waits raise Unavailable."""
        if self.abandoned is not None:
            self.abandoned.set_result(reason)
            self.abandoned = None

    async def complete(self, body: Mapping[str, Any], oldest: int) -> list[dict[str, Any]]:
        """Return the completions of a request as `binary.decode` does, every token by weights of version `oldest` or
        later.

        Raises Unavailable if there are none, EngineError if the server refuses or hangs.
        """
        choices = await self.post(binary.PATH, body, binary.decode)
        self._check_complete(choices, oldest)
        return choices

    async def score(self, body: Mapping[str, Any], oldest: int) -> list[dict[str, Any] | None]:
        """Return vLLM's `prompt_logprobs`, by weights of version `oldest` or later. Raises what `complete` raises."""
        answer = await self.post("/inference/v1/generate", body, json.loads)
        self._check_complete(answer["choices"], oldest)
        return answer["prompt_logprobs"]

    async def restore(self) -> None:
        """Make sure that the server is up, leased, and has the wanted weights. Raises Unavailable if it is not up,
        EngineError if it cannot be used."""
        async with self.restoring:
            if self.leases:
                await self.take_lease()
            await self.bring_up_to_date()

    async def bring_up_to_date(self) -> None:
        """Bring the wanted weights to a server that has others. Raises Unavailable if it is not up."""
        done = None
        try:
            while done is not self.wanted and self.wanted is not NO_WEIGHTS:
                done = self.wanted
                await self._bring(done)
        finally:
            self.receiving = False
        if done is None:
            raise Unavailable("the next weights for it are being made")

    async def check_weights(self) -> None:
        """Raises Unavailable unless the server has the wanted weights, or those that it was given last."""
        known = {self.given, self._name(self.wanted)}
        found = (await self.control("GET", "/weight_info"))["weight_version"]
        if found not in known | {self.given, self._name(self.wanted)}:
            raise Unavailable(f"it has weights {found!r}, wanted are {self._name(self.wanted)!r}")

    async def _bring(self, wanted: Weights) -> None:
        found = (await self.control("GET", "/weight_info"))["weight_version"]
        self.has_base = found.endswith(wanted.over) or (found == LOADED and wanted.over == OVER_BASE)
        if found != self.given:  # another process than the one that `transfer` speaks to, or half an update
            self._end_transfer()
        name = self._name(wanted)
        if found != name:
            await self._update(wanted, found)
        if wanted.snapshot is not None and self.given != name:
            await self.control("POST", "/resume")
            self.given = name

    async def _update(self, wanted: Weights, found: str) -> None:
        """Send the weights; the server pauses meanwhile."""
        name = self._name(wanted)
        if wanted.snapshot is None:
            raise Unavailable(f"it has weights {found!r}, wanted are {name!r}")
        # What was computed by the old weights is forgotten. Answers in flight go on from the tokens that they have;
        # after half an update, whose weights may have sampled some, they are discarded.
        mode = "keep" if found == self.given else "abort"
        self.given, self.receiving = "", True  # also a process that is given the same weights again must be resumed
        await self.control("POST", "/pause", params={"mode": mode})
        await self.control("POST", "/update_weight_version", json={"new_version": self._name(NO_WEIGHTS)})
        await self._receive(wanted)
        await self.control("POST", "/update_weight_version", json={"new_version": name})

    async def take_lease(self) -> None:
        """Lease the server for LEASE_SECONDS more, after waiting for another trainer's lease to end. Raises EngineError
        if that one renews it, or if the server cannot be used."""
        given = await self._lease()
        if not given["granted"]:
            print(f"{self.url} is leased to {given['holder']}: waiting {given['seconds']:.0f} s", flush=True)
            await asyncio.sleep(given["seconds"] + 0.1)
            given = await self._lease()
        if not given["granted"]:
            raise EngineError(
                f"{self.url} serves another trainer, {given['holder']}. Two cannot share a server, each would put its "
                "own weights there: end that one, or name another server (rollout.vllm_server_base_urls)"
            )
        if objection := self.objection(given["server"]):
            raise EngineError(
                f"{self.url} {objection}; start it as `python -m grpo_core.rollout.vllm.serve CONFIG` does"
            )
        self.backend = given["server"]["weight_transfer"]
        if (sequences := given["server"]["max_num_seqs"]) != self.sequences:
            self.room = sequences * await self._copies()
            self.sequences = sequences

    async def release(self) -> None:
        """Free the server for the next training."""
        if not self.problem:  # otherwise the lease ends by itself
            with suppress(Unavailable, EngineError):
                await self.control("POST", "/shutdown_weight_transfer_engine")
                await self.control("POST", "/collective_rpc", json={"method": "release_lease", "args": [self.token]})
        await self.http.aclose()

    def from_thread(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Do this work in the event loop, for the thread that sends weights."""
        assert self.loop
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    async def answers(self) -> bool:
        """True if the server says that it is well, which it also does while it takes weights."""
        try:
            await self._request("GET", "/health", CONTROL_SECONDS, len)
        except (Unavailable, EngineError, httpx2.ReadTimeout):
            return False
        return True

    async def control(self, method: str, path: str, **options: Any) -> Any:
        """Return the answer to a request that needs no sampling."""
        try:
            return await self._request(method, path, CONTROL_SECONDS, json.loads, **options)
        except httpx2.ReadTimeout:
            raise Unavailable(f"{path} has not answered for {CONTROL_SECONDS:g} s") from None

    def _check_complete(self, choices: Sequence[Mapping[str, Any]], oldest: int) -> None:
        """Raises Unavailable unless each completion has ended, each token by weights of version `oldest` or later."""
        for choice in choices:
            ended = choice["finish_reason"] not in ("abort", "error")
            if not ended or min(token_versions(choice, self.token), default=0) < max(oldest, 1):
                raise Unavailable(f"the answer was aborted, or is not by weights {self.token}-{oldest} or later ones")

    def _name(self, weights: Weights) -> str:
        """Return the server's name for these weights."""
        return f"{self.token}-{weights.version}" + weights.over * bool(weights.adapter) if weights.version else "none"

    async def _copies(self) -> int:
        """Number of copies of the model on the server (data parallelism). Each worker knows of one only."""
        whole, each = [
            (await self.control("GET", "/get_world_size", params={"include_dp": include}))["world_size"]
            for include in ("true", "false")
        ]
        return whole // each

    async def _lease(self) -> dict[str, Any]:
        body = {"method": "take_lease", "args": [self.token, self.holder, LEASE_SECONDS]}
        return (await self.control("POST", "/collective_rpc", json=body))["results"][0]

    async def _receive(self, weights: Weights) -> None:
        """Send the weights in a thread: one that hangs in a device's queue can only be abandoned."""
        self.loop, done = asyncio.get_running_loop(), Future[None]()

        def work() -> None:
            try:
                self.send(self, weights)
                done.set_result(None)
            except BaseException as error:
                done.set_exception(error)

        threading.Thread(target=work, daemon=True).start()
        arriving = asyncio.wrap_future(done)
        arriving.add_done_callback(
            lambda it: it.cancelled() or it.exception()
        )  # asyncio prints an error that is not read
        try:
            async with asyncio.timeout(self.seconds):
                await self._unless_abandoned(asyncio.shield(arriving))
        except TimeoutError:
            raise EngineError(
                f"{self.url}: the weights have not arrived within {self.seconds:g} s (rollout.vllm_request_timeout)"
            ) from None
        finally:
            if not done.done():
                self._end_transfer()

    def _end_transfer(self) -> None:
        transfer, self.transfer = self.transfer, None
        if transfer is not None:
            transfer.end()

    async def post(self, path: str, body: Mapping[str, Any] | None, read: Callable[[bytes], Any]) -> Any:
        """Return what `read` makes of the answer to a request that may take long."""
        try:
            return await self._request("POST", path, self.seconds, read, json=body)
        except httpx2.ReadTimeout:
            raise EngineError(
                f"{self.url}: no answer within {self.seconds:g} s (rollout.vllm_request_timeout): it hangs, or "
                "has more to do than it can; see its log, or raise the limit"
            ) from None

    async def _request(
        self, method: str, path: str, seconds: float, read: Callable[[bytes], Any], **options: Any
    ) -> Any:
        try:
            timeout = httpx2.Timeout(seconds, connect=CONTROL_SECONDS)
            answer = await self._unless_abandoned(self.http.request(method, path, timeout=timeout, **options))
        except httpx2.ReadTimeout:
            raise
        except httpx2.TransportError as error:
            raise Unavailable(f"{path}: {str(error) or type(error).__name__}") from error
        if answer.status_code == 404 and "model" in (
            options.get("json") or {}
        ):  # started again, and not known there yet
            raise Unavailable(f"{path} answers 404: {answer.text[:500]}")
        if answer.status_code == 404:
            raise EngineError(
                f"{self.url} has no {path}: it runs without VLLM_SERVER_DEV_MODE=1 or this project's middleware, or is "
                "older than vLLM 0.32; start it as `python -m grpo_core.rollout.vllm.serve CONFIG` does (its answer: "
                f"{answer.text[:500]})"
            )
        if answer.status_code >= 500:
            raise Unavailable(f"{path} answers {answer.status_code}: {answer.text[:500]}")
        if answer.is_error:
            raise EngineError(f"{self.url}{path} refuses: {answer.status_code} {answer.text[:500]}")
        try:
            return read(answer.content)
        except ValueError:
            raise Unavailable(f"{path} answers with something that cannot be read: {answer.text[:200]!r}") from None

    async def _unless_abandoned(self, work: Awaitable[Result]) -> Result:
        """Return the result of this work. Raises Unavailable as soon as the server is abandoned."""
        self.abandoned = self.abandoned or asyncio.get_running_loop().create_future()
        doing, abandoned = asyncio.ensure_future(work), self.abandoned
        both: set[asyncio.Future[Any]] = {doing, abandoned}
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if not doing.done():
                raise Unavailable(abandoned.result())
            return doing.result()
        finally:
            doing.cancel()


def token_versions(choice: Mapping[str, Any], token: str) -> list[int]:
    """Version of the weights that sampled each token of a completion; 0: not of the training with this token."""
    found = []
    for span in choice["weight_versions"] or ():
        owner, _, number = span["version"].removesuffix(OVER_BASE).removesuffix(OVER_4BIT).rpartition("-")
        found += [int(number) if owner == token else 0] * (span["end"] - span["start"])
    return found
