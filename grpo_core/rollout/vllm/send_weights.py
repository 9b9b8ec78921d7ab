"""Weights on their way to a vLLM server: by vLLM's own weight-transfer API, whatever the device.

NCCL between GPUs, CUDA IPC on one; between CPUs shared memory or, on two machines, HTTP.

Only the last two have been run by this project; the others are written against the source of vLLM 0.32, whose API it
is: each release changes it.
"""

from __future__ import annotations

import base64
import io
import json
import os
import re
import socket
import threading
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer import (
    HTTPVLLMWeightSyncClient,
    ParamMeta,
    WeightSource,
    WeightTransferTrainerFactory,
)

from grpo_core.errors import EngineError
from grpo_core.rollout.checksums import LOST, checksums_of, refuse_lost
from grpo_core.rollout.vllm.adapter import ADAPTER
from grpo_core.rollout.vllm.client import Server, Unavailable, Weights
from grpo_core.rollout.vllm.snapshot import Snapshot

PACKED_BYTES = 2**29  # of each of the two buffers that NCCL sends from, per server


class Source(WeightSource):
    """Weights that are sent next."""

    def __init__(self) -> None:
        self.snapshot: Mapping[str, Tensor] = {}

    def metadata(self) -> list[ParamMeta]:
        weights = self.snapshot
        if isinstance(weights, Snapshot):
            return [ParamMeta(name, weights.shards[0][name].dtype, weights.shape(name)) for name in weights]
        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.snapshot.items()


class Transfer(HTTPVLLMWeightSyncClient):
    """The way by which weights come to one process of a server: vLLM's client, whose requests are the server's own, and
    vLLM's trainer-side `engine`, from the first whole weights on.

    It ends when anything fails, or the server is given up: nothing more is sent, and NCCL's communicator is aborted. A
    broadcast to a server that is gone ends in no other way, and those to other servers wait behind it, since vLLM has
    two streams per device for all.
    """

    def __init__(self, server: Server):
        super().__init__(server.url)
        self.server, self.ended = server, False
        self.engine: Any = None
        self.asked: set[Future[Any]] = set()  # requests under way
        self.ending = threading.Lock()

    def update_weights(self, update_info: Any) -> None:
        """Do as vLLM's. Its engine would learn of an error only after its broadcast, which then never ends."""
        try:
            super().update_weights(update_info)
        except Exception:
            self.end()
            raise

    def end(self) -> None:
        """End it, from any thread, without waiting."""
        with self.ending:
            engine, self.engine, self.ended = self.engine, None, True
            asked, self.asked = self.asked, set()
        for each in asked:
            each.cancel()
        if engine is not None:
            threading.Thread(target=engine.shutdown, daemon=True).start()

    def lost_weights(self, sent: Mapping[str, int]) -> list[str]:
        """Return a phrase for each weight that a worker of the server has not received as it was sent."""
        try:
            answer = self._ask("collective_rpc", {"method": "lost_weights", "args": [sent]})
        except Unavailable as error:  # vLLM answers 500 where a copy of the model other than the first raises
            if found := re.search(rf"{LOST}([^\"]+)", str(error)):
                return [found[1]]
            raise
        return [*dict.fromkeys(phrase for lost in json.loads(answer)["results"] for phrase in lost)]

    def _post(self, path: str, json: dict[str, Any] | None = None) -> None:
        self._ask(path, json)

    def _ask(self, path: str, body: dict[str, Any] | None) -> bytes:
        with self.ending:
            if self.ended:
                raise Unavailable("it was given up")
            answer = self.server.from_thread(self.server.post(f"/{path}", body, bytes))
            self.asked.add(answer)
        try:
            return answer.result()
        finally:
            self.asked.discard(answer)


def send(server: Server, weights: Weights) -> None:
    """Send the weights, whose tensors the device has made, to the server. Raises Unavailable if that fails, EngineError
    if the server has received other tensors.

    Several servers may be sent to concurrently, each from its own thread over its own communicator: they have only
    this device and its streams in common, and no server waits for another, so there can be no deadlock.
    """
    snapshot = weights.snapshot
    assert snapshot is not None
    if weights.adapter is not None:
        if not server.has_base:
            if weights.base is None:
                raise EngineError(
                    f"{server.url} was given another model's weights since it was started, and the base of a sharded "
                    "model is not sent to servers; start it again"
                )
            base = weights.base()
            send(server, Weights(weights.version, base, checksums=checksums_of(base)))
        _try(server, partial(_send_adapter, server, weights.version, weights.adapter, snapshot), weights.checksums)
    else:
        _try(server, partial(_send_snapshot, server, snapshot), weights.checksums)


def _try(server: Server, give: Callable[[Transfer], None], checksums: Mapping[str, int]) -> None:
    """Send to the server by `give`. Raises what `send` raises."""
    if server.transfer is None:
        server.transfer = Transfer(server)
    transfer: Transfer = server.transfer
    try:
        give(transfer)
        lost = transfer.lost_weights(checksums)
    except Exception as error:  # of the server, sockets, the rendezvous, NCCL: none says whether the server is to blame
        transfer.end()
        raise Unavailable(f"weights cannot be sent: {type(error).__name__}: {error} (see the server's log)") from error
    refuse_lost(lost)


def _send_snapshot(server: Server, snapshot: Mapping[str, Tensor], transfer: Transfer) -> None:
    """Send whole weights by vLLM's engine."""
    device = next(iter(snapshot.values())).device
    if device.type == "cuda":
        torch.cuda.set_device(device)  # each thread has its own current device
    engine = transfer.engine = transfer.engine or _connect(server, transfer)
    engine.source.snapshot = snapshot
    engine.send_weights()
    engine.source.snapshot = {}  # the server's `wanted` alone keeps the copy, until the next is made


def _send_adapter(
    server: Server,
    version: int,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    transfer: Transfer,
) -> None:
    """Make the server's workers hold the adapter, and vLLM load it in place of the former one."""
    from grpo_core.rollout.vllm.over_http import PART_BYTES
    from grpo_core.rollout.vllm.shared_memory import parts

    def take(*arguments: Any) -> None:
        transfer._post("collective_rpc", {"method": "take_adapter_part", "args": arguments})

    for number, part in enumerate(parts(tensors.items(), PART_BYTES)):
        if server.backend == "shared_memory":
            with os.fdopen(os.memfd_create("grpo-adapter"), "wb") as file:
                torch.save(part, file)
                file.flush()
                take(number, config, f"/proc/{os.getpid()}/fd/{file.fileno()}", "")
        else:
            written = io.BytesIO()
            torch.save(part, written)
            take(number, config, None, base64.b64encode(written.getbuffer()).decode())
    # Unload it first: an adapter that it may load in place, vLLM would load again in each of its steps.
    with suppress(EngineError):  # the server has none yet
        transfer._post("v1/unload_lora_adapter", {"lora_name": ADAPTER})
    transfer._post("v1/load_lora_adapter", {"lora_name": ADAPTER, "lora_path": str(version)})


def _connect(server: Server, transfer: Transfer) -> Any:
    """Make vLLM's trainer-side engine for the server's weight transfer."""
    transfer._post("collective_rpc", {"method": "end_weight_update"})
    info: Any
    if server.backend == "nccl":
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        workers = server.from_thread(server.control("GET", "/get_world_size")).result()["world_size"]
        address, port = _meeting_point(server.url)
        info = NCCLTrainerInitInfo(address, port, 1 + workers, packed_buffer_size_bytes=PACKED_BYTES, rank=0)
    elif server.backend == "ipc":
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

        info = IPCTrainerInitInfo(rank=0)
    elif server.backend == "http":
        from grpo_core.rollout.vllm.over_http import HTTPTrainerInit

        info = HTTPTrainerInit(rank=0)
    else:
        from grpo_core.rollout.vllm.shared_memory import SharedMemoryTrainerInit

        info = SharedMemoryTrainerInit(rank=0)
    return WeightTransferTrainerFactory.trainer_init(info, client=transfer, source=Source())


def _meeting_point(url: str) -> tuple[str, int]:
    """An address of this machine that the server can reach, and a free port there."""
    there = urllib.parse.urlsplit(url)
    with socket.create_connection((there.hostname or "", there.port or 80)) as connection:
        address = connection.getsockname()[0]
    with socket.create_server((address, 0)) as free:
        return address, free.getsockname()[1]
