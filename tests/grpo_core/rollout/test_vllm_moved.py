"""What a training does about a vLLM server that is started again at another address."""

from __future__ import annotations

import asyncio
import socket
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from grpo_core.config.rollout import RolloutConfig
from grpo_core.errors import EngineError
from grpo_core.rollout.vllm import binary
from grpo_core.rollout.vllm import serve as vllm_serve
from grpo_core.rollout.vllm import server_engine as vllm_server
from grpo_core.rollout.vllm.client import Server, Unavailable, Weights
from grpo_core.rollout.vllm.router import Router
from tests.grpo_core.rollout.pretend_vllm import output
from tests.grpo_core.rollout.test_vllm_client import _answering, make_server


@pytest.mark.slow
def test_what_was_asked_of_a_server_is_asked_again_where_it_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = binary.encode([output("token-1", [5])])
    monkeypatch.setattr(vllm_server, "FOLLOW_SECONDS", 0.0)
    addresses = tmp_path / "vllm-servers"
    monkeypatch.setenv(vllm_serve.ADDRESSES, str(addresses))

    async def answer(url: str) -> Any:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            addresses.write_text(f"http://127.0.0.1:{silent.getsockname()[1]}")
            [old] = vllm_serve.read_addresses()
            server = make_server(old)
            monkeypatch.setattr(server, "restore", mock.AsyncMock())
            router = Router([server], 60.0, 0, reports=True, sender=mock.Mock())
            asked = asyncio.create_task(router.complete({"token_ids": [3]}, 1))
            await asyncio.to_thread(silent.accept)
            following = asyncio.create_task(vllm_server._follow_addresses([server]))
            addresses.write_text(url)
            found = await asked
            following.cancel()
            assert server.url == url
            return found

    with _answering(whole) as url:
        assert asyncio.run(answer(url)) == binary.decode(whole)


def test_weights_that_are_on_their_way_to_a_server_that_moves_are_not_waited_for() -> None:
    held = threading.Event()
    server = Server("http://127.0.0.1:1", RolloutConfig(), "token", "holder", str, lambda *_: held.wait(60))
    server.transfer = transfer = mock.Mock()

    async def move() -> None:
        sending = asyncio.create_task(server._receive({}))
        await asyncio.sleep(0)
        server.move("http://127.0.0.1:2")
        with pytest.raises(Unavailable, match="another address"):
            await sending

    asyncio.run(move())
    held.set()
    transfer.end.assert_called_once()


def test_weights_that_take_too_long_are_not_waited_for_and_their_way_is_ended() -> None:
    held = threading.Event()
    server = Server("http://127.0.0.1:1", RolloutConfig(), "token", "holder", str, lambda *_: held.wait(60))
    server.transfer, server.seconds = mock.Mock(), 0.01
    transfer = server.transfer
    with pytest.raises(EngineError, match=r"have not arrived within 0\.01 s \(rollout\.vllm_request_timeout\)"):
        asyncio.run(server._receive(Weights(1)))
    held.set()
    transfer.end.assert_called_once()
