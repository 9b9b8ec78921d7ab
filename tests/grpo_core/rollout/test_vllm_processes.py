"""Several processes of a training at the same servers: the main process looks after these for all."""

from __future__ import annotations

import json
import threading
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch import distributed as dist

from grpo_core import distributed
from grpo_core.rollout.vllm import client as vllm_client
from grpo_core.rollout.vllm.client import Server
from tests.grpo_core.rollout.asking import ask, model, requests, wait_until_back
from tests.grpo_core.rollout.pretend_vllm import connected, pretended
from tests.grpo_core.training.several import in_processes
from tests.serving import free_ports

pytestmark = pytest.mark.served

RENEWALS, LIMIT = 20, timedelta(seconds=60)


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_the_main_process_alone_asks_servers_for_leases_and_weights(
    processes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrived, lock = Counter[str](), threading.Lock()

    def count(path: str) -> None:
        with lock:
            arrived[path] += 1

    with pretended(128, 128) as servers:
        for server in servers:
            server.arrived = count

        def work(rank: int) -> None:
            distributed.start_processes(LIMIT)
            asked, renewed, send = Counter[str](), threading.Event(), Server._request

            async def counted(self: Server, method: str, path: str, *rest: Any, **options: Any) -> Any:
                asked[path] += 1
                if asked["/weight_info"] > 2 * RENEWALS:
                    renewed.set()
                return await send(self, method, path, *rest, **options)

            monkeypatch.setattr(Server, "_request", counted)
            with connected(tmp_path, monkeypatch, servers, model()) as engine:
                engine.sync_weights(model(2.0))
                assert engine.compute_logprobs([[3, 4]]) == [[0.0], [0.0]]  # the weights stay here
                if rank == 0:
                    assert renewed.wait(60)
                distributed.wait_for_all()
                assert len(engine.router.up) == 2
                assert [server.capacity for server in engine.servers] == [128 // processes] * 2
            found = distributed.gathered([dict(asked)])
            if rank == 0:
                (tmp_path / "asked").write_text(json.dumps(found))

        in_processes(processes, tmp_path / "work", work, *free_ports(1))
    first, *others = json.loads((tmp_path / "asked").read_text())
    assert others == [{}] * (processes - 1)
    assert arrived <= Counter(first)  # one that the end has cancelled may not have arrived


def test_a_server_that_hangs_is_left_out_by_every_process_and_comes_back_to_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_client, "CONTROL_SECONDS", 1.0)
    with pretended(128, 128) as servers:
        hanging, other = servers
        hanging.open.clear()

        def hang() -> None:
            hanging.wait_for(4)  # two of each process
            hanging.answering.clear()
            try:
                other.wait_for(8)
            finally:
                hanging.open.set()
                hanging.answering.set()

        threading.Thread(target=hang, daemon=True).start()

        def work(rank: int) -> None:
            distributed.start_processes(LIMIT)
            with connected(tmp_path, monkeypatch, servers, model()) as engine:
                ask(engine, requests(4))
                wait_until_back(engine)
                distributed.wait_for_all()

        in_processes(2, tmp_path / "work", work, *free_ports(1))


def test_a_main_process_that_is_gone_has_left_no_word(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        distributed.start_processes(LIMIT)
        if rank == 0:
            distributed.leave_word("servers", "up")
        distributed.wait_for_all()
        if rank == 1:
            found = distributed.word_of_main("servers")
            (tmp_path / "read").write_text(found)  # on which the other one ends
            with pytest.raises(dist.DistError):
                while True:
                    distributed._store().check(["servers"])
            assert (found, distributed.word_of_main("servers")) == ("up", "")
        while not (tmp_path / "read").exists():
            threading.Event().wait(0.01)

    in_processes(2, tmp_path / "work", work, *free_ports(1))
