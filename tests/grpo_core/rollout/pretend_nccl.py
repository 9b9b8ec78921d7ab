"""vLLM servers and NCCL in one process, without HTTP: a broadcast lasts until all ranks have taken part, a worker in
one answers nothing else, and only what it was told to watch takes it out of a broadcast that the sender has left."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import httpx2
import pytest
import torch
from torch import Tensor

from grpo_core.config.rollout import RolloutConfig
from grpo_core.rollout.checksums import checksums_of
from grpo_core.rollout.vllm import binary
from grpo_core.rollout.vllm import client as vllm_client
from grpo_core.rollout.vllm.client import Server, Unavailable, Weights
from grpo_core.rollout.vllm.router import Router
from tests.grpo_core.rollout.pretend_vllm import STARTED, output
from tests.grpo_core.rollout.test_vllm_client import make_transfer

WORKERS = ("/collective_rpc", "/init_weight_transfer_engine", "/start_weight_update")
WORKERS += ("/update_weights", "/finish_weight_update")  # what the workers are asked, one after the other


class Failed(Exception):
    """The server answers 500."""


class Communicator:
    """`ranks`: which process has which. `bytes_out`: what the sender's port has sent, as in NCCL's ring."""

    def __init__(self, size: int):
        self.size, self.ranks = size, dict[int, Simulated]()
        self.changed = threading.Condition()
        self.complete, self.sent = Future[None](), Future[None]()
        self.taking = set[Simulated]()
        self.aborted, self.bytes_out = False, 0

    def join(self, server: Simulated, first: int, count: int) -> None:
        with self.changed:
            for rank in range(first, first + count):
                assert rank not in self.ranks and 0 < rank < self.size, "two workers have a rank, or one has none"
                self.ranks[rank] = server
            self.changed.notify_all()

    def broadcast(self, name: str, tensor: Tensor) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.aborted or self.taking == {*self.ranks.values()}, 60)
            if self.aborted:
                raise RuntimeError("NCCL error: invalid usage")
            self.bytes_out += tensor.nbytes
            for server in [*self.taking]:
                server.loaded[name] = tensor.clone()
                if len(server.loaded) == server.stops_after:
                    self.taking.discard(server)

    def take(self, server: Simulated) -> Future[None]:
        with self.changed:
            if server.stops_after != 0:
                self.taking.add(server)
            self.changed.notify_all()
        return self.sent

    def tell_workers(self, key: str, value: str) -> None:
        """The store of the rendezvous, which the workers watch."""
        for server in {*self.ranks.values()}:
            if server.watches == key and not server.released.done():
                server.released.set_result(None)

    def shutdown(self) -> None:
        with self.changed:
            self.aborted = True
            self.changed.notify_all()


class Simulated:
    """A server. `hangs_at`: requests that it takes and never answers, as its workers then answer none; `stops_after`:
    tensors after which its workers take no part in a broadcast."""

    def __init__(self, number: int, world: World, workers: int = 2):
        self.url, self.world, self.workers = f"http://server-{number}", world, workers
        self.hangs_at, self.stops_after = set[str](), -1
        self.sampled: list[str] = []  # the weights that sampled each completion
        self.start()

    def start(self) -> None:
        self.version, self.owner, self.loaded = "default", "", dict[str, Tensor]()
        self.communicator: Communicator | None = None
        self.watches, self.released, self.paused, self.pauses = "", Future[None](), False, 0
        self.busy, self.gone = asyncio.Lock(), asyncio.Event()
        self.asked: list[str] = []

    def kill(self) -> None:
        self.gone.set()

    async def answer(self, path: str, body: dict[str, Any]) -> bytes:
        if self.gone.is_set():
            raise Failed("connection refused")
        self.asked.append(path)
        self.world.arrived(self, path)
        working = asyncio.ensure_future(self._work(path, body))
        working.add_done_callback(lambda it: it.cancelled() or it.exception())
        dying = asyncio.ensure_future(self.gone.wait())
        await asyncio.wait({working, dying}, return_when=asyncio.FIRST_COMPLETED)
        dying.cancel()
        if not working.done():
            raise Failed("connection reset")
        found = working.result()
        return found if isinstance(found, bytes) else json.dumps(found).encode()

    async def _work(self, path: str, body: dict[str, Any]) -> Any:
        if "all" in self.hangs_at:
            await self.gone.wait()
        if path in WORKERS:
            async with self.busy:
                if path in self.hangs_at or body.get("method") in self.hangs_at:
                    await self.gone.wait()
                return await self._by_workers(path, body)
        if path == "/weight_info":
            return {"weight_version": self.version}
        if path == "/pause":
            self.paused, self.pauses = True, self.pauses + 1
        if path == "/resume":
            self.paused = False
        if path == "/update_weight_version":
            self.version = body["new_version"]
        if path == "/get_world_size":
            return {"world_size": self.workers}
        if path == binary.PATH:
            assert not self.paused, "asked while it gets weights"
            self.sampled.append(self.version if self.has(self.world.weights) else "other weights")
            return binary.encode([output(self.version, [5])])
        return {}

    async def _by_workers(self, path: str, body: dict[str, Any]) -> Any:
        method, communicator = body.get("method"), self.communicator
        if method == "take_lease":
            self.owner = self.owner or body["args"][0]
            started = {**STARTED, "weight_transfer": "nccl"}
            return {"results": [{"granted": True, "holder": self.owner, "seconds": 0.0, "server": started}]}
        if method == "end_weight_update":
            self.communicator = None
            return {"results": [self.workers] * self.workers}
        if method == "watch_sender":
            (self.watches,) = body["args"]
        if method == "lost_weights":
            return {"results": [[] if checksums_of(self.loaded) == body["args"][0] else ["weight did not arrive"]]}
        if path == "/init_weight_transfer_engine":
            assert communicator is None, "NCCL would keep the last one"
            self.watches, self.released = "", Future()
            self.communicator = self.world.made[body["init_info"]["communicator"]]
            self.communicator.join(self, body["init_info"]["rank_offset"], self.workers)
            await asyncio.shield(asyncio.wrap_future(self.communicator.complete))
        if path == "/start_weight_update":
            self.loaded = {}
        if path == "/update_weights":
            assert communicator
            taken = communicator.take(self)
            if self.stops_after >= 0:
                await self.gone.wait()
            ends = [asyncio.wrap_future(each) for each in (taken, self.released)]
            await asyncio.wait([asyncio.shield(each) for each in ends], return_when=asyncio.FIRST_COMPLETED)
            if not communicator.sent.done():
                raise Failed("the communicator was aborted")
        return {}

    def has(self, weights: Mapping[str, Tensor]) -> bool:
        return checksums_of(self.loaded) == checksums_of(weights)


class Engine:
    """vLLM's trainer-side engine."""

    def __init__(self, communicator: Communicator, client: Any, source: Any):
        self.communicator, self.client, self.source = communicator, client, source
        store = SimpleNamespace(set=communicator.tell_workers)
        self.model_update_group = SimpleNamespace(group=SimpleNamespace(store=store))
        self.shutdown = communicator.shutdown

    def send_weights(self) -> None:
        self.client.start_weight_update()
        self.communicator.sent, self.communicator.taking = Future(), set()
        threads = ThreadPoolExecutor(max_workers=1)
        answer = threads.submit(self.client.update_weights, {"names": []})
        try:
            for name, tensor in self.source:
                self.communicator.broadcast(name, tensor)
            self.communicator.sent.set_result(None)
            answer.result()
        finally:
            threads.shutdown(wait=False)
        self.client.finish_weight_update()


class World:
    """Servers, a router over them, and the communicators that were made for them."""

    def __init__(self, count: int, transfer: Any):
        self.made: list[Communicator] = []
        self.arrived: Callable[[Simulated, str], object] = lambda server, path: None
        self.rendezvous_seconds = 60.0
        self.simulated = [Simulated(number, self) for number in range(count)]
        self.weights: dict[str, Tensor] = {}
        self.version = 0
        self.transfer, self.sender = transfer, transfer.Sender()
        config = RolloutConfig()
        self.servers = [
            Server(each.url, config, "token", "holder", lambda started: "", self.sender.send) for each in self.simulated
        ]
        self.router = Router(self.servers, 60.0, 0, reports=False, sender=self.sender)
        self.bytes = sum(each.nbytes for each in self.next_weights().values())

    @property
    def bytes_out(self) -> int:
        return sum(each.bytes_out for each in self.made)

    def next_weights(self) -> dict[str, Tensor]:
        return {str(number): torch.full((2, 8), self.version + number / 8) for number in range(5)}

    def want(self, **keys: Any) -> Weights:
        """Let the servers have the next weights."""
        self.version += 1
        self.weights = self.next_weights()
        weights = Weights(self.version, self.weights, checksums=checksums_of(self.weights), **keys)
        for server in self.servers:
            server.wanted = weights
        return weights

    async def hand_over(self) -> None:
        self.want()
        await self.router.hand_over()

    async def sample(self) -> None:
        """One completion at each server that is up."""
        for server in self.router.up:
            await server.complete({"token_ids": [3], "sampling_params": {}}, self.version)

    async def back(self) -> None:
        """Wait until all servers are up."""
        await asyncio.gather(*self.router.bringing_back.values())
        assert len(self.router.up) == len(self.servers)

    def connect(self, info: Any, *, client: Any, source: Any) -> Engine:
        """Do as vLLM: all ranks meet, or none has a communicator."""
        communicator = Communicator(info.size)
        self.made.append(communicator)
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(
                client.init_weight_transfer_engine, {"rank_offset": 1, "communicator": len(self.made) - 1}
            )
            with communicator.changed:
                whole = communicator.changed.wait_for(
                    lambda: len(communicator.ranks) == info.size - 1, self.rendezvous_seconds
                )
            if whole:
                communicator.complete.set_result(None)
            else:
                communicator.complete.set_exception(Failed("the store of the rendezvous is gone"))
                raise TimeoutError("timed out waiting for clients")
            asked.result()
        return Engine(communicator, client, source)


@asynccontextmanager
async def simulated(count: int, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    """Several servers, leased."""
    transfer = make_transfer()
    world = World(count, transfer)
    by_url = {each.url: each for each in world.simulated}
    waiting = set[asyncio.Future[bytes]]()

    async def request(
        self: Server, method: str, path: str, seconds: float, read: Callable[[bytes], Any], **options: Any
    ) -> Any:
        answering = asyncio.ensure_future(by_url[self.url].answer(path, options.get("json") or {}))
        answering.add_done_callback(lambda it: it.cancelled() or it.exception())
        waiting.add(answering)
        try:
            return read(await self._unless_abandoned(asyncio.wait_for(asyncio.shield(answering), seconds)))
        except TimeoutError:
            raise httpx2.ReadTimeout("") from None
        except Failed as error:
            raise Unavailable(f"{path} answers 500: {error}") from None

    info = mock.Mock(
        NCCLTrainerInitInfo=lambda address, port, size, packed_buffer_size_bytes, rank: SimpleNamespace(size=size)
    )
    monkeypatch.setitem(sys.modules, "vllm.distributed.weight_transfer.nccl_engine", info)
    monkeypatch.setattr(transfer, "_meeting_point", lambda urls: ("127.0.0.1", 1))
    monkeypatch.setattr(transfer.WeightTransferTrainerFactory, "trainer_init", world.connect)
    monkeypatch.setattr(Server, "_request", request)
    monkeypatch.setattr(vllm_client, "CONTROL_SECONDS", 60.0)
    await world.router.connect()
    try:
        yield world
    finally:
        world.router.stop()
        for each in world.simulated:
            each.kill()
        await asyncio.gather(*waiting, return_exceptions=True)
