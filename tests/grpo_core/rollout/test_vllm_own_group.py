"""The code of vLLM on both sides of a sending by NCCL: its rendezvous, the workers' ranks, what is packed and unpacked.
Only NCCL's library and the streams are pretended."""

from __future__ import annotations

import json
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import ExitStack, nullcontext, suppress
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests import forked

pytestmark = pytest.mark.served

SERVERS = [(1, 1), (1, 2), (2, 2)]  # copies of the model, and workers per copy


def test_vllms_own_code_sends_one_copy_to_servers_of_any_number_of_workers_and_lets_one_that_hangs_go() -> None:
    found = forked.call(send_twice)
    assert found["has"] == [[True], [True] * 2, [True] * 4], found
    assert found["sent"] == found["bytes"]
    assert found["errors"] == [None] * 3
    assert found["has, one hanging"] == [[False], [True] * 2, [True] * 4], found
    assert found["sent, one hanging"] <= 2 * found["bytes"]
    assert [error and error.split(":")[0] for error in found["errors, one hanging"]] == ["Unavailable", None, None]


class Ring:
    """What NCCL does for one communicator; a rank that has aborted takes no part."""

    all: ClassVar[dict[str, Ring]] = {}
    sent: ClassVar[int] = 0

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.parts: list[Tensor] = []
        self.taken = Counter[int]()
        self.aborted = set[int]()

    def broadcast(self, rank: int, size: int, tensor: Tensor) -> None:
        with self.changed:
            if rank == 0:
                self.parts.append(tensor.clone())
                whole = len(self.parts)
                self.changed.notify_all()
                self.wait(0, lambda: all(self.taken[other] >= whole for other in range(1, size)))
                Ring.sent += tensor.nbytes
            else:
                self.wait(rank, lambda: len(self.parts) > self.taken[rank])
                tensor.copy_(self.parts[self.taken[rank]])
                self.taken[rank] += 1
                self.changed.notify_all()

    def wait(self, rank: int, done: Callable[[], bool]) -> None:
        assert self.changed.wait_for(lambda: rank in self.aborted or done(), 60)
        if rank in self.aborted:
            raise RuntimeError("NCCL error: invalid usage")


class Communicator:
    """In the place of vLLM's PyNcclCommunicator."""

    def __init__(self, group: Any, device: Any):
        self.group, self.rank, self.size, self.disabled = group, group.rank, group.world_size, False
        name = group.broadcast_obj(uuid.uuid4().hex if self.rank == 0 else None, src=0)
        self.ring = Ring.all.setdefault(name, Ring())

    def broadcast(self, tensor: Tensor, src: int) -> None:
        self.ring.broadcast(self.rank, self.size, tensor)

    def destroy(self) -> None:
        self.disabled = True
        with self.ring.changed:
            self.ring.aborted.add(self.rank)
            self.ring.changed.notify_all()


class Model(torch.nn.Module):
    """`waits`: set when it may go on loading."""

    def __init__(self) -> None:
        super().__init__()
        self.got: dict[str, Tensor] = {}
        self.waits = threading.Event()
        self.waits.set()

    def load_weights(self, weights: Any) -> set[str]:
        assert self.waits.wait(60)
        self.got |= {name: tensor.clone() for name, tensor in weights}
        return {*self.got}


def make_worker(copies: int, copy: int, each: int, rank: int) -> Any:
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine
    from vllm.v1.worker.gpu_worker import Worker

    from grpo_core.rollout.checksums import bit_sums, note_loading
    from grpo_core.rollout.vllm.worker import TrainerLease

    model = Model()
    parallel = SimpleNamespace(data_parallel_index=copy, world_size=each, rank=rank, world_size_across_dp=copies * each)
    config: Any = SimpleNamespace(parallel_config=parallel, model_config=None)
    engine = NCCLWeightTransferEngine(None, config, torch.device("cpu"), model)  # type: ignore[arg-type]
    engine.start_weight_update = engine.finish_weight_update = lambda: None  # type: ignore[method-assign]
    asked = ("init_weight_transfer_engine", "shutdown_weight_transfer_engine", "_check_weight_transfer_engine")
    asked += ("start_weight_update", "_start_weight_update", "update_weights", "finish_weight_update")  # type: ignore
    worker: Any = type("W", (TrainerLease,), {name: getattr(Worker, name) for name in asked})()
    worker.weight_transfer_engine, worker.vllm_config, worker.device = engine, config, torch.device("cpu")
    worker._weight_update_active = worker._weight_update_is_draft = False
    worker.model, worker.model_runner, worker.rank = model, mock.Mock(), rank
    worker._received = note_loading(model, bit_sums)
    return worker


class Stand:
    """A `client.Server` whose workers are in this process."""

    backend, has_base, url = "nccl", True, "http://127.0.0.1:1"

    def __init__(self, copies: int, each: int):
        self.workers = [make_worker(copies, copy, each, rank) for copy in range(copies) for rank in range(each)]
        self.threads = [ThreadPoolExecutor(1) for _ in self.workers]
        self.each, self.transfer = each, None

    def post(self, path: str, body: Any, read: Any) -> tuple[str, Any]:
        return path[1:], body

    def from_thread(self, work: tuple[str, Any]) -> Future[bytes]:
        path, body = work
        if path == "collective_rpc":
            path, arguments = body["method"], body.get("args", [])
        else:
            arguments = [*(body or {}).values()]
        asked = [
            threads.submit(getattr(worker, path), *arguments)
            for threads, worker in zip(self.threads, self.workers, strict=True)
        ]
        answer = Future[bytes]()

        def wait() -> None:
            errors = [each.exception() for each in asked]
            error = next(filter(None, errors), None)
            with suppress(InvalidStateError):  # it was cancelled
                if error:
                    answer.set_exception(error)
                else:
                    answer.set_result(json.dumps({"results": [each.result() for each in asked[: self.each]]}).encode())

        threading.Thread(target=wait, daemon=True).start()
        return answer

    def has(self, weights: dict[str, Tensor]) -> list[bool]:
        return [
            all(torch.equal(worker.model.got.get(name, torch.zeros(())), each) for name, each in weights.items())
            for worker in self.workers
        ]


def pretended() -> Iterator[Any]:
    from vllm.distributed.device_communicators import pynccl
    from vllm.distributed.weight_transfer import packed_tensor
    from vllm.v1.worker import gpu_worker

    stream = SimpleNamespace(synchronize=lambda: None)
    yield mock.patch.object(pynccl, "PyNcclCommunicator", Communicator)
    yield mock.patch.object(packed_tensor, "_get_streams", lambda *_: (stream, stream))
    yield mock.patch.object(gpu_worker, "set_current_vllm_config", lambda _: nullcontext())
    yield mock.patch.object(torch.cuda, "stream", lambda _: nullcontext())
    nothing = {"current_device_index": lambda: 0, "synchronize": lambda: None}
    yield mock.patch.multiple(torch.accelerator, **nothing)


def send_twice() -> dict[str, Any]:
    """What servers have after one sending to all and a second one in which the first one's worker hangs, what was sent,
    and what each server's sending raised."""
    from grpo_core.rollout.checksums import checksums_of
    from grpo_core.rollout.vllm import send_weights
    from grpo_core.rollout.vllm.client import Weights
    from tests.serving import free_ports

    found: dict[str, Any] = {}
    with ExitStack() as patches:
        for patch in pretended():
            patches.enter_context(patch)
        sender, servers = send_weights.Sender(), [Stand(*each) for each in SERVERS]
        patches.enter_context(
            mock.patch.multiple(
                send_weights,
                PACKED_BYTES=64,
                CONTROL_SECONDS=2.0,
                STALL_SECONDS=2.0,
                _meeting_point=lambda urls: ("127.0.0.1", *free_ports(1)),
            )
        )

        def give(version: int) -> tuple[int, list[str | None], dict[str, Tensor]]:
            snapshot = {str(number): torch.randn(3, 5) for number in range(9)}
            weights = Weights(version, snapshot, checksums=checksums_of(snapshot))
            before, errors = Ring.sent, list[str | None]()
            sender.expect(servers)  # type: ignore[arg-type]
            with ThreadPoolExecutor() as threads:
                sending = [threads.submit(sender.send, server, weights) for server in servers]  # type: ignore[arg-type]
                for each in sending:
                    error = each.exception()
                    errors.append(f"{type(error).__name__}: {error}" if error else None)
            return Ring.sent - before, errors, snapshot

        found["sent"], found["errors"], snapshot = give(1)
        found["bytes"] = sum(each.nbytes for each in snapshot.values())
        found["has"] = [server.has(snapshot) for server in servers]
        hanging = servers[0].workers[0].model.waits
        hanging.clear()
        found["sent, one hanging"], found["errors, one hanging"], snapshot = give(2)
        found["has, one hanging"] = [server.has(snapshot) for server in servers]
        hanging.set()
        assert sender.group
        sender.group.shutdown()
    return found
