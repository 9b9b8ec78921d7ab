"""Log-probabilities of a teacher behind a vLLM server, which may be away for a while.

The server is asked from an event loop in a thread, so that a training that is told to stop waits for no answer.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import httpx2
from accelerate import PartialState

from grpo_core.config.run import RunConfig
from grpo_core.data.served_teacher import client_options, content_of, logprobs_of, scoring, teacher_among
from grpo_core.errors import EngineError
from grpo_core.rollout.vllm.client import CONTROL_SECONDS, SOCKET_OPTIONS
from grpo_core.rollout.vllm.router import POLL_SECONDS
from grpo_core.rollout.waiting import ATTEMPTS

CONCURRENT = 64  # requests per process

Answer = TypeVar("Answer")

teachers: dict[httpx2.URL, tuple[str, str | None]] = {}  # names and sources of the models that servers had at first
away = set[str]()  # servers that were said to be away


def served_logprobs(config: RunConfig, asked: Sequence[tuple[list[int], list[int]]]) -> Iterator[list[float]]:
    """Yield the teacher's log-probabilities of the tokens of each completion: (prompt, completion), in ids. Raises
    EngineError if the server does not come back within the time limits, refuses, or answers with something else."""
    limits = httpx2.Limits(max_connections=CONCURRENT, max_keepalive_connections=0)
    transport = httpx2.AsyncHTTPTransport(limits=limits, socket_options=SOCKET_OPTIONS)
    options = client_options(config, config.rollout.vllm_request_timeout)
    http = httpx2.AsyncClient(**options, transport=transport)
    ask = partial(_ask, config, http, asyncio.Lock())

    async def score(model: str, prompt: list[int], completion: list[int]) -> list[float]:
        ids = prompt + completion
        body = scoring(model, ids)
        return await ask("/v1/completions", body, lambda answer: logprobs_of(answer, ids, len(prompt)))

    loop = asyncio.new_event_loop()
    threading.Thread(target=partial(_turn, loop), daemon=True).start()
    start = partial(asyncio.run_coroutine_threadsafe, loop=loop)
    futures: list[Any] = [start(ask("/v1/models", None, lambda answer: teacher_among(config, answer)))]
    try:
        model = _same(config, http.base_url, futures[0].result())
        futures = [start(score(model, *each)) for each in asked]
        for future in futures:
            yield future.result()
    finally:
        for future in futures:
            future.cancel()  # which ends its request, if the wait was interrupted
        start(http.aclose()).add_done_callback(lambda _: loop.stop())  # called by the loop itself


def wait_for_teacher(config: RunConfig) -> None:
    """Wait until the teacher's server is up, before anything else is asked of it. Raises EngineError if it is not
    within rollout.vllm_server_timeout."""

    async def wait() -> None:
        async with httpx2.AsyncClient(**client_options(config, CONTROL_SECONDS)) as http:
            await _wait(http, config.rollout.vllm_server_timeout, _named(config), "")

    asyncio.run(wait())


def _named(config: RunConfig) -> str:
    return f"the teacher's server at {config.teacher.url}"


def _turn(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.close()


def _same(config: RunConfig, address: httpx2.URL, found: dict[str, Any]) -> str:
    """Return the name of the model. Raises EngineError if the server, which may be another process now, had another
    one at first."""
    model, content = found["id"], found.get("root")
    if (before := teachers.setdefault(address, (model, content))) != (model, content):
        raise EngineError(
            f"{_named(config)} has been started again with {model!r} ({content}) "
            f"instead of {before[0]!r} ({before[1]}): start it with the teacher of this training"
        )
    return model


async def _ask(
    config: RunConfig,
    http: httpx2.AsyncClient,
    waiting: asyncio.Lock,
    path: str,
    body: Any,
    read: Callable[[Any], Answer],
) -> Answer:
    """Return what is read from the server's answer; it is asked again if it was not available. `waiting`: held while
    one request waits for the server, so that answers from before it came back are not taken for another failure."""
    server, keys, failure = _named(config), config.rollout, ""
    for _ in range(ATTEMPTS):
        try:
            return read(content_of(await http.request("GET" if body is None else "POST", path, json=body)))
        except httpx2.ReadTimeout:
            raise EngineError(
                f"{server}: no answer within {keys.vllm_request_timeout:g} s (rollout.vllm_request_timeout): it hangs, "
                "or has more to do than it can; see its log, or raise the limit"
            ) from None
        except httpx2.HTTPStatusError as error:
            if error.response.status_code < 500:
                raise EngineError(f"{server} refuses: {error}") from None
            failure = str(error)
        except (LookupError, TypeError, AttributeError) as error:
            raise EngineError(f"{server}: no answer of a vLLM server to {path}: {error!r}") from None
        except (httpx2.HTTPError, ValueError) as error:
            failure = repr(error)
        async with waiting:
            await _wait(http, keys.vllm_server_timeout, server, failure)
    raise EngineError(f"{server}: {ATTEMPTS} attempts at one answer have failed; the last: {failure}")


async def _wait(http: httpx2.AsyncClient, seconds: float, server: str, failure: str) -> None:
    """Wait until the server is up. Raises EngineError if it is not within these seconds."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            if (answer := await http.get("/health", timeout=CONTROL_SECONDS)).is_success:
                _report(server)
                return
            failure = f"/health answers {answer.status_code}"
        except httpx2.HTTPError as error:
            failure = repr(error)
        _report(server, failure)
        if time.monotonic() > deadline:
            raise EngineError(
                f"{server} is not available for {seconds:g} s (rollout.vllm_server_timeout): {failure}. Start it "
                "again, then this run: it goes on from its last checkpoint"
            )
        await asyncio.sleep(POLL_SECONDS)


def _report(server: str, failure: str = "") -> None:
    """Print, once for all requests, that the server is away or, without a failure, that it is back."""
    if (server in away) == bool(failure):
        return
    (away.add if failure else away.remove)(server)
    if PartialState().is_main_process:
        print(f"{server} {f'is away: {failure}' if failure else 'is back'}", flush=True)
