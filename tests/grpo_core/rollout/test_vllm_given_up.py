"""A server that fails while weights go to it and another by NCCL, pretended after vLLM's engine: a broadcast lasts
until all servers have taken part, or the communicator is aborted."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed import TCPStore

from grpo_core.rollout.vllm import client as vllm_client
from grpo_core.rollout.vllm import server_engine
from grpo_core.rollout.vllm.server_engine import VLLMServerEngine
from tests import forked
from tests.grpo_core.rollout.asking import ask, model, requests, wait_until_back
from tests.grpo_core.rollout.pretend_vllm import Pretended, connected, pretended
from tests.grpo_core.rollout.test_lost_weights import make_worker
from tests.grpo_core.rollout.test_vllm_client import make_transfer
from tests.pretend_gpu import pretend_gpu
from tests.serving import free_ports

pytestmark = pytest.mark.served

AWAY = "/update_weights"


class Broadcasting:
    """What send_weights of vLLM's NCCL engine waits for, and in which order."""

    def __init__(self, group: Any, source: Any, servers: list[Pretended]):
        self.group, self.source, self.servers = group, source, servers
        self.over, self.aborted = threading.Event(), threading.Event()
        self.model_update_group = mock.Mock()

    def send_weights(self) -> None:
        self.over = threading.Event()
        self.group.start_weight_update()
        threads = ThreadPoolExecutor(max_workers=1)
        answer = threads.submit(self.group.update_weights, {"names": []})
        answer.add_done_callback(self._answered)
        assert self.over.wait(60)
        answer.result()
        threads.shutdown(wait=False)
        self.group.finish_weight_update()
        for server in self.servers:
            server.weights = self.source.snapshot["weight"].flatten()[0].clone()

    def _answered(self, answer: Future[None]) -> None:
        if answer.exception() is None:
            self.over.set()

    def shutdown(self) -> None:
        self.aborted.set()
        self.over.set()


@contextmanager
def two_servers(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Pretended, Pretended, list[Broadcasting], VLLMServerEngine]]:
    """With the first weights; and the trainer-side engines that were made."""
    transfer, made = make_transfer(), list[Broadcasting]()
    monkeypatch.setattr(vllm_client, "CONTROL_SECONDS", 1.0)
    monkeypatch.setattr(transfer, "CONTROL_SECONDS", 1.0)
    monkeypatch.setattr(server_engine, "_objection", lambda *_: "")
    monkeypatch.setitem(sys.modules, "vllm.distributed.weight_transfer.nccl_engine", mock.Mock())
    with pretended(128, 128) as servers:
        for server in servers:
            server.started["weight_transfer"] = "nccl"

        def connect(info: Any, *, client: Any, source: Any) -> Broadcasting:
            urls = [each.server.url for each in client.transfers]
            made.append(Broadcasting(client, source, [each for each in servers if each.url in urls]))
            return made[-1]

        monkeypatch.setattr(transfer.WeightTransferTrainerFactory, "trainer_init", connect)
        with connected(folder, monkeypatch, servers, model(1.0), sender=transfer.Sender) as engine:
            assert engine.compute_logprobs([[3, 4]]) == [[-1.0], [-1.0]]
            yield servers[0], servers[1], made, engine


def when_asked(server: Pretended, path: str, then: Callable[[], None]) -> None:
    """Do something once, when the server is first asked for this."""

    def arrived(asked: str) -> None:
        if asked == path:
            server.arrived = lambda _: None
            then()

    server.arrived = arrived


def test_a_server_that_dies_while_weights_go_to_it_is_left_out_and_holds_no_other_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with two_servers(tmp_path, monkeypatch) as (dying, _, made, engine):
        when_asked(dying, AWAY, lambda: threading.Thread(target=dying.kill, daemon=True).start())
        engine.sync_weights(model(2.0))
        assert engine.compute_logprobs([[3, 4]]) == [[-2.0]]
        assert [each.aborted.is_set() for each in made] == [True, False]
        ask(engine, requests(4))
        dying.start()
        wait_until_back(engine)
        assert engine.compute_logprobs([[3, 4]]) == [[-2.0], [-2.0]]
        assert [len(each.servers) for each in made] == [2, 1, 1], "both; without the one; the one by itself"
        engine.sync_weights(model(3.0))
        assert engine.compute_logprobs([[3, 4]]) == [[-3.0], [-3.0]]
        assert [len(each.servers) for each in made] == [2, 1, 1, 2]
    either = f"weights cannot be sent: Unavailable: {AWAY}: |it does not answer while it gets weights"
    assert re.search(f"{dying.url} is left out: ({either})", capfd.readouterr().out)


@pytest.mark.parametrize("by_itself", [False, True])
def test_a_server_that_falls_silent_while_weights_go_to_it_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], by_itself: bool
) -> None:
    """Also where none were due, and it was found to lack them."""
    with two_servers(tmp_path, monkeypatch) as (silent, _, made, engine):
        sent = threading.Event()

        def fall_silent() -> None:
            silent.answering.clear()
            sent.set()

        when_asked(silent, AWAY, fall_silent)
        if by_itself:
            silent.version = "default"
            assert sent.wait(60)
        else:
            engine.sync_weights(model(2.0))
            assert engine.compute_logprobs([[3, 4]]) == [[-2.0]]
        broken = [each for each in made if len(each.servers) == (1 if by_itself else 2)][-1]
        assert broken.aborted.wait(30), "before the broadcast has given up by itself"
        silent.answering.set()  # what it was sent before must not come between
        wait_until_back(engine)
        assert len(engine.compute_logprobs([[3, 4]])) == 2
    reason = "has weights 'default'" if by_itself else "does not answer while it gets weights"
    assert f"{silent.url} is left out: it {reason}" in capfd.readouterr().out


def test_a_server_that_is_only_busy_with_its_weights_keeps_getting_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its workers answer nothing else meanwhile, not even about the lease."""
    healthy = threading.Event()
    with two_servers(tmp_path, monkeypatch) as (busy, _, made, engine):

        def work() -> None:
            busy.held |= {AWAY, "/collective_rpc"}
            when_asked(busy, "/health", healthy.set)

        when_asked(busy, AWAY, work)
        syncing = threading.Thread(target=engine.sync_weights, args=(model(2.0),), daemon=True)
        syncing.start()
        assert healthy.wait(60), "it was not asked whether it is well"
        busy.held.clear()
        syncing.join(60)
        assert engine.compute_logprobs([[3, 4]]) == [[-2.0], [-2.0]]
        assert len(made) == 1
    assert "left out" not in capfd.readouterr().out


def test_a_server_that_was_started_again_leaves_no_communicator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with two_servers(tmp_path, monkeypatch) as (first, _, made, engine):
        first.kill()
        first.start()
        engine.sync_weights(model(2.0))
        wait_until_back(engine)
        assert made[0].aborted.wait(60)
        assert sum(not each.aborted.is_set() for each in made) == 1


@pytest.mark.parametrize("trainer", ["says so", "is gone"])
def test_a_worker_aborts_its_communicator_when_the_trainer_has(trainer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, it asks for news more than once."""
    worker, (port,) = make_worker(0), free_ports(1)
    monkeypatch.setitem(worker.watch_sender.__globals__, "WATCH", timedelta(milliseconds=20))
    options: dict[str, Any] = {"wait_for_workers": False, "use_libuv": False}  # as vLLM's
    of_trainer = TCPStore("127.0.0.1", port, is_master=True, **options)
    store, asked, aborted = TCPStore("127.0.0.1", port, **options), threading.Semaphore(0), threading.Event()

    def wait(keys: list[str], limit: timedelta) -> None:
        asked.release()
        store.wait(keys, limit)

    worker.weight_transfer_engine = mock.Mock()
    communicator = worker.weight_transfer_engine.model_update_group
    communicator.disabled, communicator.destroy, communicator.group.store.wait = False, aborted.set, wait
    worker.watch_sender("ended")
    for _ in range(3):
        assert asked.acquire(timeout=60)
    assert not aborted.is_set()
    if trainer == "says so":
        of_trainer.set("ended", "")
    del of_trainer
    assert aborted.wait(60)


def test_the_copies_alone_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole device would wait for a broadcast to another server too."""
    waited = list[Any]()
    with pretend_gpu(), monkeypatch.context() as patch:
        stream = type("Stream", (), {"synchronize": lambda _: waited.append("stream")})
        patch.setattr(torch.cuda, "current_stream", lambda device: waited.append(device) or stream())
        server_engine._made({"a": torch.zeros(1, device="cuda"), "b": torch.ones(2, device="cuda")})
    assert waited == [torch.device("cuda", 0), "stream"]


def test_vllms_own_engine_ends_its_broadcast_when_the_server_fails() -> None:
    error, aborted, broadcasts = forked.call(broadcast_to_a_server_that_dies)
    assert error in ("ConnectionError: it died", "RuntimeError: NCCL error: invalid usage")
    assert aborted == 1
    assert broadcasts <= 2, "of nine: one per buffer"


def broadcast_to_a_server_that_dies() -> list[Any]:
    """What vLLM's engine raises, how often its communicator is aborted, and how many broadcasts it began. NCCL's
    library and the streams are pretended: what is queued on them ends when the communicator is aborted, which takes no
    more."""
    from vllm.distributed.device_communicators import pynccl
    from vllm.distributed.weight_transfer import packed_tensor
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerWeightTransferEngine

    from grpo_core.rollout.vllm.send_weights import Group, Transfer

    idle, queued, aborted = threading.Event(), threading.Event(), threading.Event()
    communicating = threading.Lock()
    idle.set()

    def broadcast(*_: Any) -> None:
        with communicating:
            if aborted.is_set():
                raise RuntimeError("NCCL error: invalid usage")
            idle.clear()
            queued.set()

    def abort(_: Any) -> None:
        with communicating:
            aborted.set()
            idle.set()

    class Dying(Transfer):
        def ask(self, path: str, body: Any) -> Future[bytes]:
            return threads.submit(self.answer, path)

        def answer(self, path: str) -> bytes:
            if f"/{path}" == AWAY:
                assert queued.wait(60)
                raise ConnectionError("it died")
            return b""

    stream = SimpleNamespace(synchronize=lambda: idle.wait(60), cuda_stream=0)
    nccl = mock.Mock()
    nccl.ncclBroadcast.side_effect, nccl.ncclCommAbort.side_effect = broadcast, abort
    communicator: Any = pynccl.PyNcclCommunicator.__new__(pynccl.PyNcclCommunicator)
    communicator.available, communicator.disabled, communicator.rank = True, False, 0
    communicator.device, communicator.nccl, communicator.comm = torch.device("cpu"), nccl, object()
    communicator.group = mock.Mock()
    server: Any = SimpleNamespace(url="http://127.0.0.1:1")
    group, threads, found = Group([Dying(server)]), ThreadPoolExecutor(), list[Any]()
    engine = NCCLTrainerWeightTransferEngine(client=group, source=group.source, packed_buffer_size_bytes=8)
    engine.model_update_group, group.engine = communicator, engine
    engine.source.snapshot = {str(number): torch.ones(2) for number in range(9)}
    with (
        mock.patch.object(packed_tensor, "_get_streams", lambda *_: (stream, stream)),
        mock.patch.object(pynccl, "current_stream", lambda: stream),
        mock.patch.multiple(torch.accelerator, device_index=lambda _: nullcontext(), current_device_index=lambda: 0),
        mock.patch.object(torch.cuda, "stream", lambda _: nullcontext()),
    ):
        try:
            engine.send_weights()
        except (ConnectionError, RuntimeError) as error:
            found = [f"{type(error).__name__}: {error}", nccl.ncclCommAbort.call_count, nccl.ncclBroadcast.call_count]
    return found
