"""Weights on their way to a vLLM server: by vLLM's own weight-transfer API, whatever the device.

NCCL between GPUs, CUDA IPC on one; between CPUs shared memory or, on two machines, HTTP.

Only the last two have been run by this project; the others are written against the source of vLLM 0.32, whose API it
is: each release changes it.
"""

from __future__ import annotations

import base64
import io
import os
import socket
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import httpx2
import torch
from torch import Tensor
from vllm.distributed.weight_transfer import (
    HTTPVLLMWeightSyncClient,
    ParamMeta,
    WeightSource,
    WeightTransferTrainerFactory,
)

from grpo_core.errors import EngineError
from grpo_core.rollout.vllm.adapter import ADAPTER
from grpo_core.rollout.vllm.client import SOCKET_OPTIONS, Server, Unavailable, Weights, certificates
from grpo_core.rollout.vllm.secret import with_secret
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


class Client(HTTPVLLMWeightSyncClient):
    """vLLM's client for the routes by which weights come, without the proxies that the environment names."""

    def _post(self, path: str, json: dict[str, Any] | None = None) -> None:
        _ask("POST", f"{self.base_url}/{path}", self.timeout, json)


def send(server: Server, weights: Weights) -> None:
    """Send the weights to the server. Raises Unavailable if that fails.

    Several servers may be sent to concurrently, each from its own thread over its own communicator: they have only
    this device in common, and no server waits for another, so there can be no deadlock.
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
            send(server, Weights(weights.version, weights.base()))
        _try(server, partial(_send_adapter, server, weights.version, weights.adapter, snapshot))
        return
    device = next(iter(snapshot.values())).device

    def give() -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)  # each thread has its own current device
            torch.cuda.synchronize(device)  # the copies are made; vLLM reads them on streams that wait for no other
        if server.transfer is None:
            server.transfer = _connect(server)
        server.transfer.source.snapshot = snapshot
        server.transfer.send_weights()
        server.transfer.source.snapshot = {}  # the server's `wanted` alone keeps the copy, until the next is made

    _try(server, give)


def _try(server: Server, give: Callable[[], None]) -> None:
    """Send to the server by `give`. Raises Unavailable if that fails."""
    try:
        give()
    except Exception as error:  # of HTTP, sockets, the rendezvous, NCCL: none says whether the server is to blame
        server.transfer = None
        answer = getattr(error, "response", None)
        body = "" if answer is None else f": {answer.text[:500]}"
        raise Unavailable(
            f"weights cannot be sent: {type(error).__name__}: {error}{body} (see the server's log)"
        ) from error


def _send_adapter(server: Server, version: int, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Make the server's workers hold the adapter, and vLLM load it in place of the former one."""
    from grpo_core.rollout.vllm.over_http import PART_BYTES
    from grpo_core.rollout.vllm.shared_memory import parts

    def take(*arguments: Any) -> None:
        body = {"method": "take_adapter_part", "args": arguments}
        _ask("POST", f"{server.url}/collective_rpc", server.seconds, body)

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
    with suppress(httpx2.HTTPStatusError):  # the server has none yet
        _ask("POST", f"{server.url}/v1/unload_lora_adapter", server.seconds, {"lora_name": ADAPTER})
    _ask(
        "POST", f"{server.url}/v1/load_lora_adapter", server.seconds, {"lora_name": ADAPTER, "lora_path": str(version)}
    )


def _connect(server: Server) -> Any:
    """Make vLLM's trainer-side engine for the server's weight transfer."""
    _ask("POST", f"{server.url}/collective_rpc", server.seconds, {"method": "end_weight_update"})
    client = Client(server.url, timeout=server.seconds)
    info: Any
    if server.backend == "nccl":
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        workers = _ask("GET", f"{server.url}/get_world_size", server.seconds).json()["world_size"]
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
    return WeightTransferTrainerFactory.trainer_init(info, client=client, source=Source())


def _ask(method: str, url: str, seconds: float, json: dict[str, Any] | None = None) -> httpx2.Response:
    """Return the answer to a request through no proxy. Raises httpx2.HTTPError if there is none or it is an error."""
    transport = httpx2.HTTPTransport(verify=certificates(), socket_options=SOCKET_OPTIONS)
    with httpx2.Client(transport=transport, timeout=seconds, headers=with_secret(), trust_env=False) as client:
        return client.request(method, url, json=json).raise_for_status()


def _meeting_point(url: str) -> tuple[str, int]:
    """An address of this machine that the server can reach, and a free port there."""
    there = urllib.parse.urlsplit(url)
    with socket.create_connection((there.hostname or "", there.port or 80)) as connection:
        address = connection.getsockname()[0]
    with socket.create_server((address, 0)) as free:
        return address, free.getsockname()[1]
