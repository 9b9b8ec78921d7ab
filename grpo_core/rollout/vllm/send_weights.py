"""Weights on their way to vLLM servers: by vLLM's own weight-transfer API, whatever the device.

NCCL between GPUs, to all servers over one communicator; CUDA IPC on one GPU; between CPUs shared memory or, on two
machines, HTTP.

Only the last two have been run by this project; the others are written against the source of vLLM 0.32, whose API it
is: each release changes it.
"""

from __future__ import annotations

import base64
import io
import itertools
import json
import os
import re
import socket
import threading
import urllib.parse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
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

from grpo_core.config.memory_bounds import PACKED_BYTES
from grpo_core.errors import EngineError
from grpo_core.rollout.checksums import LOST, checksums_of, refuse_lost
from grpo_core.rollout.vllm.adapter import ADAPTER
from grpo_core.rollout.vllm.client import CONTROL_SECONDS, Server, Unavailable, Weights
from grpo_core.rollout.vllm.snapshot import Snapshot

STALL_SECONDS = 120.0  # after which a sending by NCCL in which nothing moves is given up, and a check of what arrived
LOOPBACK = "127."  # how addresses begin that other machines do not reach
TOGETHER = ("init_weight_transfer_engine", "update_weights")  # what one server cannot answer without the others
ENDED = "ended"  # key in the store of a communicator's rendezvous: the trainer has given the communicator up


class Source(WeightSource):
    """Weights that are sent next."""

    def __init__(self) -> None:
        self.snapshot: Mapping[str, Tensor] = {}
        self.taken = 0  # tensors so far

    def metadata(self) -> list[ParamMeta]:
        weights = self.snapshot
        if isinstance(weights, Snapshot):
            return [ParamMeta(name, weights.shards[0][name].dtype, weights.shape(name)) for name in weights]
        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for item in self.snapshot.items():
            self.taken += 1
            yield item


class Transfer(HTTPVLLMWeightSyncClient):
    """The way by which weights come to one process of a server: vLLM's client, whose requests are the server's own, and
    vLLM's trainer-side `engine`, from the first whole weights on; by NCCL, the `Group` in its place.

    It ends when anything fails, or the server is given up: nothing more is sent.
    """

    def __init__(self, server: Server):
        super().__init__(server.url)
        self.server, self.ended = server, False
        self.engine: Any = None
        self.asked: set[Future[Any]] = set()  # requests under way
        self.ending = threading.Lock()

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
            answer = self.ask("collective_rpc", {"method": "lost_weights", "args": [sent]}).result(STALL_SECONDS)
        except Unavailable as error:  # vLLM answers 500 where a copy of the model other than the first raises
            if found := re.search(rf"{LOST}([^\"]+)", str(error)):
                return [found[1]]
            raise
        return [*dict.fromkeys(phrase for lost in json.loads(answer)["results"] for phrase in lost)]

    def ask(self, path: str, body: dict[str, Any] | None) -> Future[bytes]:
        """Ask the server, without waiting for its answer."""
        with self.ending:
            if self.ended:
                answer = Future[bytes]()
                answer.set_exception(Unavailable("it was given up"))
                return answer
            answer = self.server.from_thread(self.server.post(f"/{path}", body, bytes))
            self.asked.add(answer)
        answer.add_done_callback(lambda it: self.asked.discard(it))
        return answer

    def _post(self, path: str, json: dict[str, Any] | None = None) -> None:
        self.ask(path, json).result()


class Group(HTTPVLLMWeightSyncClient):
    """The way by which weights come to several servers over one communicator of NCCL: vLLM's client, each of whose
    requests all servers are asked, and vLLM's trainer-side `engine`.

    It ends when anything fails for one of them: the communicator is aborted here and in all workers (`watch_sender`),
    since a broadcast that one rank leaves ends in no other way. `lost`: the servers by which it failed, each with its
    error; none if that is not known.
    """

    def __init__(self, transfers: Sequence[Transfer]):
        super().__init__("")
        self.transfers, self.ended = transfers, False
        self.engine: Any = None
        self.offsets: list[int] = []  # of each server, the rank of its first worker
        self.source = Source()
        self.lost: dict[Transfer, BaseException] = {}
        self.ending = threading.Lock()
        for each in transfers:
            each.engine = self

    def connect(self) -> None:
        """Make the communicator. Each server has answered before: one that does not would hold up the others in it."""
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        answers = self._ask("collective_rpc", itertools.repeat({"method": "end_weight_update"}))
        workers = [json.loads(answer)["results"][0] for answer in answers]
        *self.offsets, size = itertools.accumulate(workers, initial=1)
        address, port = _meeting_point([each.server.url for each in self.transfers])
        info = NCCLTrainerInitInfo(address, port, size, packed_buffer_size_bytes=PACKED_BYTES, rank=0)
        self.engine = WeightTransferTrainerFactory.trainer_init(info, client=self, source=self.source)
        self._ask("collective_rpc", itertools.repeat({"method": "watch_sender", "args": [ENDED]}))

    def send(self, snapshot: Mapping[str, Tensor]) -> None:
        self.source.snapshot = snapshot
        try:
            self.engine.send_weights()
        finally:
            self.source.snapshot = {}  # the servers' `wanted` alone keeps the copy, until the next is made

    def shutdown(self) -> None:
        """End it, from any thread."""
        with self.ending:
            engine, self.engine, self.ended = self.engine, None, True
        if engine is not None:
            with suppress(Exception):  # the workers also abort when the store is gone
                engine.model_update_group.group.store.set(ENDED, "")
            engine.shutdown()

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Do as vLLM's, which knows of one server, whose ranks begin after the sender's."""
        bodies = ({"init_info": {**init_info, "rank_offset": offset}} for offset in self.offsets)
        self._ask("init_weight_transfer_engine", bodies)

    def _post(self, path: str, json: dict[str, Any] | None = None) -> None:
        self._ask(path, itertools.repeat(json))

    def _ask(self, path: str, bodies: Iterable[dict[str, Any] | None]) -> list[bytes]:
        """Return the answers of all servers. When one fails, or nothing moves any more, end: vLLM's engine would learn
        of it only after its broadcast, which then never ends."""
        seconds = CONTROL_SECONDS if path == "collective_rpc" else STALL_SECONDS
        asked = {each: each.ask(path, body) for each, body in zip(self.transfers, bodies, strict=False)}
        left, errors, moves = {*asked.values()}, dict[Transfer, BaseException](), True
        while left and moves and not errors:
            taken = self.source.taken
            done, left = wait(left, seconds, FIRST_COMPLETED)
            moves = bool(done) or self.source.taken > taken
            errors = {each: error for each, answer in asked.items() if answer in done and (error := _error(answer))}
        if left and not errors and path not in TOGETHER:
            silent = Unavailable(f"/{path} has not answered for {seconds:g} s")
            errors = {each: silent for each, answer in asked.items() if answer in left}
        if left or errors:
            if not self.ended:  # otherwise they follow from its end
                self.lost |= errors
            self.shutdown()
            raise next(iter(errors.values()), Unavailable(f"/{path}: nothing has moved for {seconds:g} s"))
        return [answer.result() for answer in asked.values()]


class Sender:
    """Sends weights to servers, each in a thread of its own.

    Whole weights go by NCCL to all servers together that are due, over one communicator, so one copy leaves this
    machine whatever their number. A server that comes later is in the next sending, whose communicator replaces the
    last. Sendings follow one another, since vLLM has two streams per device for all.
    """

    def __init__(self) -> None:
        self.due = set[Server]()  # for which the next sending waits
        self.waiting = dict[Transfer, tuple[Weights, Future[Mapping[str, int]]]]()
        self.sending = False
        self.lock = threading.Lock()  # for these three
        self.group: Group | None = None

    def expect(self, servers: Iterable[Server]) -> None:
        """Let the next sending wait until each server has come or been taken out by `leave`."""
        with self.lock:
            self.due = {*servers}

    def leave(self, server: Server) -> None:
        """Let no sending wait for the server: it has come, or will not."""
        with self.lock:
            self.due.discard(server)
        self._begin()

    def send(self, server: Server, weights: Weights) -> None:
        """Send the weights, whose tensors the device has made, to the server. Raises Unavailable if that fails,
        EngineError if the server has received other tensors."""
        assert weights.snapshot is not None
        if weights.adapter is None:
            self._send_whole(server, weights)
            return
        if not server.has_base:
            if weights.base is None:
                raise EngineError(
                    f"{server.url} was given another model's weights since it was started, and the base of a sharded "
                    "model is not sent to servers; start it again"
                )
            self._send_whole(server, weights)
        _try(server, partial(_send_adapter, server, weights))

    def _send_whole(self, server: Server, weights: Weights) -> None:
        _try(server, partial(self._join if server.backend == "nccl" else _send_alone, weights))

    def _join(self, weights: Weights, transfer: Transfer) -> Mapping[str, int]:
        """Wait until a sending has brought whole weights to the server; return their checksums."""
        arrived = Future[Mapping[str, int]]()
        with self.lock:
            self.waiting[transfer] = weights, arrived
        self.leave(transfer.server)
        return arrived.result()

    def _begin(self) -> None:
        """Begin the next sending, of the newest weights, if nothing is left to wait for."""
        with self.lock:
            if self.due or self.sending or not self.waiting:
                return
            newest = max((weights for weights, _ in self.waiting.values()), key=lambda weights: weights.version)
            members = {each: arrived for each, (weights, arrived) in self.waiting.items() if weights is newest}
            for each in members:
                del self.waiting[each]
            self.sending = True
        threading.Thread(target=self._send_together, args=(newest, members), daemon=True).start()

    def _send_together(self, weights: Weights, members: dict[Transfer, Future[Mapping[str, int]]]) -> None:
        """Send whole weights to these servers. When that fails, send them again to those that are not to blame."""
        try:
            snapshot, checksums = _whole(weights)
            is_first = True  # of failures without a server to blame; asked again, one that hangs does not answer
            while members:
                try:
                    self._group_of(members).send(snapshot)
                except Exception as error:
                    assert self.group
                    self.group.shutdown()
                    given_up = {each: Unavailable("it was given up") for each in members if each.ended}
                    lost = {**self.group.lost, **given_up}
                    if not lost and not is_first:
                        raise
                    is_first = bool(lost)
                    for each, reason in lost.items():
                        members.pop(each).set_exception(reason)
                    if members:
                        print(f"weights go by NCCL again, to {len(members)} servers: {error}", flush=True)
                else:
                    break
            for arrived in members.values():
                arrived.set_result(checksums)
        except BaseException as error:
            for arrived in members.values():
                arrived.set_exception(error)
        finally:
            with self.lock:
                self.sending = False
            self._begin()

    def _group_of(self, transfers: Iterable[Transfer]) -> Group:
        """The last group if it has these servers, or else another."""
        if self.group is None or self.group.ended or {*self.group.transfers} != {*transfers}:
            if self.group is not None:
                self.group.shutdown()
            self.group = Group([*transfers])
            self.group.connect()
        return self.group


def _try(server: Server, give: Callable[[Transfer], Mapping[str, int]]) -> None:
    """Send to the server by `give`, which returns the checksums of what it sends. Raises what `Sender.send` raises."""
    if server.transfer is None:
        server.transfer = Transfer(server)
    transfer: Transfer = server.transfer
    try:
        lost = transfer.lost_weights(give(transfer))
    except Exception as error:  # of the server, sockets, the rendezvous, NCCL: none says whether the server is to blame
        transfer.end()
        raise Unavailable(f"weights cannot be sent: {type(error).__name__}: {error} (see the server's log)") from error
    refuse_lost(lost)


def _whole(weights: Weights) -> tuple[Mapping[str, Tensor], Mapping[str, int]]:
    """Whole weights, the base's under an adapter, and their checksums; their device becomes this thread's."""
    assert weights.snapshot is not None
    snapshot, checksums = weights.snapshot, weights.checksums
    if weights.adapter is not None:
        assert weights.base
        snapshot = weights.base()
        checksums = checksums_of(snapshot)
    device = next(iter(snapshot.values())).device
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return snapshot, checksums


def _send_alone(weights: Weights, transfer: Transfer) -> Mapping[str, int]:
    """Send whole weights by vLLM's engine to one server; return their checksums."""
    snapshot, checksums = _whole(weights)
    engine = transfer.engine = transfer.engine or _connect(transfer)
    engine.source.snapshot = snapshot
    engine.send_weights()
    engine.source.snapshot = {}  # the server's `wanted` alone keeps the copy, until the next is made
    return checksums


def _send_adapter(server: Server, weights: Weights, transfer: Transfer) -> Mapping[str, int]:
    """Make the server's workers hold the adapter, and vLLM load it in place of the former one; return its checksums."""
    from grpo_core.rollout.vllm.over_http import PART_BYTES
    from grpo_core.rollout.vllm.shared_memory import parts

    def take(*arguments: Any) -> None:
        transfer._post("collective_rpc", {"method": "take_adapter_part", "args": arguments})

    assert weights.snapshot is not None
    for number, part in enumerate(parts(weights.snapshot.items(), PART_BYTES)):
        if server.backend == "shared_memory":
            with os.fdopen(os.memfd_create("grpo-adapter"), "wb") as file:
                torch.save(part, file)
                file.flush()
                take(number, weights.adapter, f"/proc/{os.getpid()}/fd/{file.fileno()}", "")
        else:
            written = io.BytesIO()
            torch.save(part, written)
            take(number, weights.adapter, None, base64.b64encode(written.getbuffer()).decode())
    # Unload it first: an adapter that it may load in place, vLLM would load again in each of its steps.
    with suppress(EngineError):  # the server has none yet
        transfer._post("v1/unload_lora_adapter", {"lora_name": ADAPTER})
    transfer._post("v1/load_lora_adapter", {"lora_name": ADAPTER, "lora_path": str(weights.version)})
    return weights.checksums


def _connect(transfer: Transfer) -> Any:
    """Make vLLM's trainer-side engine for the weight transfer of one server."""
    transfer._post("collective_rpc", {"method": "end_weight_update"})
    info: Any
    if transfer.server.backend == "ipc":
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

        info = IPCTrainerInitInfo(rank=0)
    elif transfer.server.backend == "http":
        from grpo_core.rollout.vllm.over_http import HTTPTrainerInit

        info = HTTPTrainerInit(rank=0)
    else:
        from grpo_core.rollout.vllm.shared_memory import SharedMemoryTrainerInit

        info = SharedMemoryTrainerInit(rank=0)
    return WeightTransferTrainerFactory.trainer_init(info, client=transfer, source=Source())


def _error(answer: Future[bytes]) -> BaseException | None:
    return Unavailable("it was given up") if answer.cancelled() else answer.exception()


def _meeting_point(urls: Iterable[str]) -> tuple[str, int]:
    """An address of this machine that the servers can reach, and a free port there. Those on this machine also reach
    the address that others know."""
    found = []
    for there in map(urllib.parse.urlsplit, urls):
        where = there.hostname or "", there.port or 80
        with socket.create_connection(where, CONTROL_SECONDS) as connection:
            found.append(connection.getsockname()[0])
    address = next((each for each in found if not each.startswith(LOOPBACK)), found[0])
    with socket.create_server((address, 0)) as free:
        return address, free.getsockname()[1]
