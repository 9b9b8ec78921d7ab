"""Log-probabilities of a teacher behind a vLLM server, which may be away for a while."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import httpx2
from accelerate import PartialState

from grpo_core.config.run import RunConfig
from grpo_core.data.served_teacher import ask, connect, logprobs_of, scoring, served_model
from grpo_core.errors import EngineError
from grpo_core.rollout.vllm.client import CONTROL_SECONDS, SOCKET_OPTIONS
from grpo_core.rollout.vllm.router import POLL_SECONDS
from grpo_core.rollout.waiting import ATTEMPTS

CONCURRENT = 64  # requests per process

Answer = TypeVar("Answer")

teachers: dict[httpx2.URL, tuple[str, str | None]] = {}  # names and sources of the models that servers had at first
away, lock = set[str](), threading.Lock()  # servers that were said to be away


def served_logprobs(config: RunConfig, asked: Sequence[tuple[list[int], list[int]]]) -> Iterator[list[float]]:
    """Yield the teacher's log-probabilities of the tokens of each completion: (prompt, completion), in ids. Raises
    EngineError if the server does not come back within the time limits, refuses, or answers with something else."""
    with (
        connect(config, config.rollout.vllm_request_timeout, CONCURRENT, SOCKET_OPTIONS) as http,
        ThreadPoolExecutor(CONCURRENT) as pool,
    ):
        found = _patiently(config, http, partial(served_model, config, http))
        model, content = found["id"], found.get("root")
        if (before := teachers.setdefault(http.base_url, (model, content))) != (model, content):
            raise EngineError(
                f"the teacher's server at {config.teacher.url} has been started again with {model!r} ({content}) "
                f"instead of {before[0]!r} ({before[1]}): start it with the teacher of this training"
            )

        def score(prompt: list[int], completion: list[int]) -> list[float]:
            ids = prompt + completion
            answer = _patiently(config, http, partial(ask, http, "/v1/completions", scoring(model, ids)))
            return logprobs_of(answer, ids, len(prompt))

        yield from pool.map(score, *zip(*asked, strict=True))


def _patiently(config: RunConfig, http: httpx2.Client, asked: Callable[[], Answer]) -> Answer:
    """Return the answer of the server, which is asked again if it was not available."""
    server, keys, failure = f"the teacher's server at {config.teacher.url}", config.rollout, ""
    for _ in range(ATTEMPTS):
        try:
            return asked()
        except httpx2.ReadTimeout:
            raise EngineError(
                f"{server}: no answer within {keys.vllm_request_timeout:g} s (rollout.vllm_request_timeout): it hangs, "
                "or has more to do than it can; see its log, or raise the limit"
            ) from None
        except httpx2.HTTPStatusError as error:
            if error.response.status_code < 500:
                raise EngineError(f"{server} refuses: {error}") from None
            failure = str(error)
        except (httpx2.HTTPError, ValueError) as error:
            failure = repr(error)
        _wait(http, keys.vllm_server_timeout, server, failure)
    raise EngineError(f"{server}: {ATTEMPTS} attempts at one answer have failed; the last: {failure}")


def _wait(http: httpx2.Client, seconds: float, server: str, failure: str) -> None:
    """Wait until the server is up. Raises EngineError if it is not within these seconds."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            if http.get("/health", timeout=CONTROL_SECONDS).is_success:
                _report(server)
                return
        except httpx2.HTTPError as error:
            failure = repr(error)
        _report(server, failure)
        if time.monotonic() > deadline:
            raise EngineError(
                f"{server} is not available for {seconds:g} s (rollout.vllm_server_timeout): {failure}. Start it "
                "again, then this run: it goes on from its last checkpoint"
            )
        time.sleep(POLL_SECONDS)


def _report(server: str, failure: str = "") -> None:
    """Print, once for all threads, that the server is away or, without a failure, that it is back."""
    with lock:
        if (server in away) == bool(failure):
            return
        (away.add if failure else away.remove)(server)
    if PartialState().is_main_process:
        print(f"{server} {f'is away: {failure}' if failure else 'is back'}", flush=True)
