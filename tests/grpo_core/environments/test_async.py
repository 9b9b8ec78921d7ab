"""Between two calls, while the policy writes, an async environment's event loop runs on."""

from __future__ import annotations

import asyncio

import pytest
from websockets.asyncio.server import ServerConnection, serve

from grpo_core.config.environment import EnvironmentConfig
from grpo_core.environments.conversation import reset_request
from grpo_core.environments.processes import Environment, Environments

pytestmark = pytest.mark.slow
SECONDS = 60.0  # in which a message arrives on a busy machine


async def _ask(asked: Environment, **request: object) -> object:
    """Ask while this process's own loop runs, which serves the connection."""
    asked.ask(request, SECONDS)
    answer = await asyncio.to_thread(asked.answer, SECONDS)
    assert answer is not None
    return answer["value"]


async def _play(environment: Environment) -> None:
    connections: asyncio.Queue[ServerConnection] = asyncio.Queue()

    async def keep(connection: ServerConnection) -> None:
        connections.put_nowait(connection)
        await connection.wait_closed()

    async with asyncio.timeout(SECONDS), serve(keep, "127.0.0.1", 0, ping_interval=None) as server:
        port = next(iter(server.sockets)).getsockname()[1]
        await _ask(environment, **reset_request("", 1, {"url": f"ws://127.0.0.1:{port}"}))
        connection = await connections.get()
        await (await connection.ping())  # the pong arrives although the environment is asked for nothing
        await connection.send("news")
        assert await connection.recv() == "heard news"
        assert await _ask(environment, do="call", name="own_loop", arguments={}) == "done"
        assert await _ask(environment, do="call", name="say", arguments={"text": "hello"}) == "news"
        assert await connection.recv() == "hello"


def test_a_kept_connection_is_answered_and_tasks_go_on_between_two_calls() -> None:
    environments = Environments(EnvironmentConfig(environment_factory="tests.grpo_core.environments.keeping:Keeping"))
    try:
        asyncio.run(_play(environments.take()))
    finally:
        environments.close()
