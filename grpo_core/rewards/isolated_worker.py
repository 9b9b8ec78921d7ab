"""The process of an isolated reward: `python -m grpo_core.rewards.isolated_worker DESCRIPTOR`.

There are two processes: a child that imports and runs the function, and its parent, the guard, which runs none of the
user's code. When the asking process ends or closes the guard's standard input, or when the child ends, the guard ends
everything that the child has started, and then itself, with the child's exit status.

Each request is a connection that arrives over the socket DESCRIPTOR. The first request is (configuration, sys.path),
the others are (Batch, state of the random generators or None).
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import pickle
import socket
import sys
from typing import Any

from grpo_core.config.inputs import RewardConfig
from grpo_core.errors import RewardError
from grpo_core.rewards.batch import Batch
from grpo_core.rewards.contract import Reward, files_here, resolve_here
from grpo_core.rewards.isolated import draws_state, kind_names, set_draws_state
from grpo_core.rewards.scoring import checked, message_of, plain_answer
from grpo_core.rewards.trl_arguments import CallLog
from grpo_core.system.guard import OPEN_FILES, flush_output, guarded, limit_resources

CHUNK = 1 << 20  # bytes read together


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    guarded(control)
    serve(control)


def serve(control: socket.socket) -> None:
    """Answer the requests that arrive over `control` until it is closed."""
    connection = _next(control)
    if connection is None:
        return
    me = os.getpid()
    config, sys.path[:] = pickle.loads(_read(connection))
    limit_resources(config.memory_gib)
    try:
        reward = resolve_here(config)
    except RewardError as error:
        _send(connection, _message(me, {"refused": str(error)}))
        return
    _send(connection, _message(me, describe(config, reward)))
    if reward.is_async:
        asyncio.run(_serve_concurrently(reward, control, me))
        return
    while connection := _next(control):
        batch, state = pickle.loads(_read(connection))
        carried, log = set_draws_state(state), CallLog()
        try:
            answer = _result(reward, plain_answer(reward, batch, log), batch, log)
        except BaseException as error:
            answer = _failure(error)
        _send(connection, _message(me, answer | _draws(carried)))


async def _serve_concurrently(reward: Reward, control: socket.socket, me: int) -> None:
    """Start each call when it arrives, while others are waiting."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    calls: set[asyncio.Task[None]] = set()
    carried: set[str] = set()

    async def call(connection: socket.socket) -> None:
        nonlocal carried
        connection.setblocking(False)
        parts = []
        while part := await loop.sock_recv(connection, CHUNK):
            parts.append(part)
        batch, state = pickle.loads(b"".join(parts))
        if state:  # no other call is under way
            carried = set_draws_state(state)
        log = CallLog()
        try:
            answer = _result(reward, await reward.function(**batch.arguments(reward, log)), batch, log)
        except BaseException as error:
            answer = _failure(error)
        with connection:
            await loop.sock_sendall(connection, _message(me, answer | _draws(carried)))
            connection.shutdown(socket.SHUT_RDWR)

    def accept() -> None:
        if connection := _next(control):
            calls.add(task := loop.create_task(call(connection)))
            task.add_done_callback(calls.discard)
        else:
            ended.set()

    loop.add_reader(control, accept)
    await ended.wait()


def describe(config: RewardConfig, reward: Reward) -> dict[str, Any]:
    """Facts that the training needs about the function, which it does not import."""
    return {
        "columns": {column: kind_names(kind) for column, kind in reward.columns.items()},
        "accepts": None if reward.accepts is None else sorted(reward.accepts),
        "is_async": reward.is_async,
        "needs_environments": reward.needs_environments,
        "reads_state": reward.reads_state,
        "files": files_here(config),
    }


def _result(reward: Reward, values: Any, batch: Batch, log: CallLog) -> dict[str, Any]:
    logged = {"logged": [log.columns, log.figures]}
    try:
        numbers = checked(reward, values, batch)
    except RewardError as error:
        return {"broken": str(error), **logged}
    return {"values": [None if math.isnan(number) else number for number in numbers], **logged}


def _failure(error: BaseException) -> dict[str, Any]:
    if isinstance(error, RewardError):
        return {"refused": str(error)}
    return {"raised": [type(error).__name__, message_of(error)]}


def _draws(carried: set[str]) -> dict[str, Any]:
    return {"draws": {name: state for name, state in draws_state().items() if name in carried}}


def _next(control: socket.socket) -> socket.socket | None:
    """The next request's connection; None if no more can arrive."""
    something, descriptors, _, _ = socket.recv_fds(control, 1, 1)
    if something and not descriptors:
        raise OSError(f"all of the process's {OPEN_FILES} descriptors are in use; let the function close its files")
    return socket.socket(fileno=descriptors[0]) if descriptors else None


def _read(connection: socket.socket) -> bytes:
    parts = []
    while part := connection.recv(CHUNK):
        parts.append(part)
    return b"".join(parts)


def _message(me: int, answer: dict[str, Any]) -> bytes:
    """The answer as bytes, once everything that the function has printed is flushed."""
    if os.getpid() != me:  # the function has forked, and the fork has returned from it too
        os._exit(0)
    flush_output()
    return json.dumps(answer).encode()


def _send(connection: socket.socket, message: bytes) -> None:
    with connection:
        connection.sendall(message)
        connection.shutdown(socket.SHUT_RDWR)  # ends the message, even if something else holds the connection open


if __name__ == "__main__":
    main()
