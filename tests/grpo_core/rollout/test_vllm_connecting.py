"""Which of several servers a training begins with, sends its weights to, and leaves out."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from grpo_core.errors import EngineError
from grpo_core.rollout.vllm.client import Unavailable, Weights
from tests.grpo_core.rollout.asking import SAMPLING, ask, model, requests, wait_until_back
from tests.grpo_core.rollout.pretend_vllm import Serving, connected, pretended


@pytest.mark.slow
def test_a_server_that_another_training_has_taken_is_left_out(
    serving: Serving, capfd: pytest.CaptureFixture[str]
) -> None:
    with serving(128, 128) as (servers, engine):
        servers[0].owner, servers[0].version = "another", "another-1"
        ask(engine, requests(6))
        engine.sync_weights(model(2.0))
        assert engine.compute_logprobs([[3, 4]]) == [[-2.0]]
        servers[1].owner = "another"
        with pytest.raises(EngineError, match=r"serves another trainer, another.*serves another trainer, another"):
            engine.sync_weights(model(3.0))
    assert "is left out" in capfd.readouterr().out


@pytest.mark.slow
def test_without_any_server_the_error_names_all_of_them_and_why(serving: Serving) -> None:
    with serving(128, 128, vllm_server_timeout=0.05) as (servers, engine):
        for server in servers:
            server.kill()
        with pytest.raises(EngineError) as raised:
            for _ in engine.generate(requests(4), SAMPLING):
                pass
        said = str(raised.value)
        assert "not available for 0.05 s (rollout.vllm_server_timeout)" in said
        for server in servers:
            assert f"{server.url}: " in said
        with pytest.raises(EngineError, match="not available"):
            engine.sync_weights(model(2.0))
        with pytest.raises(EngineError, match="not available"):
            engine.compute_logprobs([[3, 4]])


@pytest.mark.slow
def test_weights_on_their_way_to_the_only_server_are_waited_for(serving: Serving) -> None:
    sending, go_on = threading.Event(), threading.Event()
    with serving(128) as (servers, engine):
        give = engine.servers[0].send

        def slow(*arguments: Any) -> None:
            sending.set()
            assert go_on.wait(60)
            give(*arguments)

        engine.servers[0].send = slow
        servers[0].kill()
        engine._run(engine.router.connect())  # which notices
        syncing = threading.Thread(target=engine.sync_weights, args=(model(2.0),), daemon=True)
        syncing.start()
        servers[0].start()
        assert sending.wait(60)
        engine.router.seconds = 0.0  # the time is over
        syncing.join(0.1)
        assert syncing.is_alive()
        go_on.set()
        syncing.join(60)
        assert engine.compute_logprobs([[3, 4]]) == [[-2.0]]


@pytest.mark.slow
def test_a_server_that_is_not_up_at_the_start_joins_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pretended(128, 128) as servers:
        servers[1].kill()
        with connected(tmp_path, monkeypatch, servers, model(5.0)) as engine:
            ask(engine, requests(4))
            servers[1].start()
            wait_until_back(engine)
            assert engine.compute_logprobs([[3, 4]]) == [[-5.0], [-5.0]]


@pytest.mark.slow
def test_a_server_that_cannot_be_used_is_refused_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pretended(128, 128) as servers:
        servers[1].started["dtype"] = "float16"
        with (
            pytest.raises(EngineError, match=f"{servers[1].url} computes in float16"),
            connected(tmp_path, monkeypatch, servers, model()),
        ):
            pass


@pytest.mark.slow
def test_servers_get_their_weights_at_the_same_time(serving: Serving) -> None:
    both = threading.Barrier(2, timeout=60)

    def send(*_: Any) -> None:
        both.wait()

    with serving(128, 128, sender=lambda: mock.Mock(send=send)) as (_, engine):
        engine.sync_weights(model())


@pytest.mark.slow
def test_a_server_that_dies_while_it_gets_weights_is_left_out(serving: Serving) -> None:
    policy = model(1.0)
    with serving(128, 128, model=policy) as (servers, engine):
        give = engine.servers[0].send

        def die_first(server: Any, weights: Weights) -> None:
            if server.url == servers[0].url and not servers[0].life.is_set():
                servers[0].kill()
                raise Unavailable("the connection is broken")
            give(server, weights)

        for server in engine.servers:
            server.send = die_first
        engine.sync_weights(model(2.0))
        assert engine.compute_logprobs([[3, 4]]) == [[-2.0]]
        ask(engine, requests(4))


@pytest.mark.slow
def test_other_processes_sample_where_the_main_process_brought_the_weights(serving: Serving) -> None:
    with serving(128, 128) as (servers, engine):
        states = [("it is away", 128), ("", 64)]
        engine._run(engine.router.adopt(states))
        assert [server.url for server in engine.router.up] == [servers[1].url]
        assert engine.servers[1].capacity == 64
