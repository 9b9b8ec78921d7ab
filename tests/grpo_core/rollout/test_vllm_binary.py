"""Completions as bytes, and the middleware that answers with them, over an engine that stands for vLLM's."""

from __future__ import annotations

import asyncio
import json
import math
import sys
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

from grpo_core.rollout.vllm.binary import PATH, BinaryCompletions, decode, encode
from tests.held import held


def _output(index: int, ids: list[int], logprobs: list[float], starts: list[int]) -> Any:
    flat = SimpleNamespace(logprobs=logprobs, start_indices=starts)
    return SimpleNamespace(index=index, token_ids=ids, logprobs=flat, finish_reason="stop", weight_versions=None)


def test_ids_and_log_probabilities_come_back_as_they_were() -> None:
    draw = np.random.default_rng(0)
    ids = [draw.integers(0, 200_000, count).tolist() for count in (0, 1, 500)]
    logprobs = [(-20 * draw.random(len(each), np.float32)).tolist() for each in ids]
    outputs = [_output(0, some, own, [*range(len(own))]) for some, own in zip(ids, logprobs, strict=True)]
    found = decode(encode(outputs))
    assert [each["token_ids"] for each in found] == ids
    assert [each["logprobs"] for each in found] == logprobs  # each a float32, so without rounding


def test_the_sampled_tokens_log_probability_is_the_first_of_its_position_and_not_a_number_if_infinite() -> None:
    [found] = decode(encode([_output(0, [7, 8, 9], [-1.0, -5.0, -math.inf, -2.0, math.nan], [0, 2, 4])]))
    assert found["logprobs"] == pytest.approx([-1.0, math.nan, math.nan], nan_ok=True)


@pytest.mark.parametrize("answer", [b"", b"<html>this network wants you to log in</html>", encode([])[:2]])
def test_other_bytes_are_refused(answer: bytes) -> None:
    with pytest.raises(ValueError):
        decode(answer)


def test_bytes_that_end_too_early_are_refused() -> None:
    with pytest.raises(ValueError):
        decode(encode([_output(0, [7, 8], [-1.0, -2.0], [0, 1])])[:-1])


class RefusedError(Exception):
    """vLLM's VLLMClientError, which is no ValueError."""


class Engine:
    """vLLM's engine: answers at once, refuses a long prompt, and never answers a prompt of 0."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.ended = asyncio.Event()

    async def generate(self, prompt: Any, sampling: Any, name: str, **options: Any) -> AsyncIterator[Any]:
        self.asked.append({"prompt": prompt, "sampling": sampling, **options})
        if len(prompt) > 3:
            raise RefusedError("the prompt is too long")
        try:
            if prompt == [0]:
                await asyncio.Event().wait()
            yield SimpleNamespace(outputs=[_output(1, [4], [-2.0], [0]), _output(0, [3], [-1.0], [0])])
        finally:
            self.ended.set()


async def _ask(engine: Engine, body: dict[str, Any], gone: asyncio.Event | None = None) -> tuple[int, bytes]:
    """Status and body of an answer; (0, b"") for a client that is gone before it."""
    state = SimpleNamespace(
        engine_client=engine, openai_serving_models=SimpleNamespace(lora_requests={"policy": "the adapter"})
    )
    received = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
    sent: list[dict[str, Any]] = []

    async def receive() -> Any:
        if received:
            return received.pop()
        if gone is None:
            await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": PATH, "headers": [], "app": SimpleNamespace(state=state)}
    vllm = mock.Mock(SamplingParams=lambda **keys: keys, tokens_input=lambda ids: ids, VLLMClientError=RefusedError)
    names = ("vllm", "vllm.exceptions", "vllm.inputs", "vllm.inputs.engine", "vllm.sampling_params")
    with held(sys.modules, dict.fromkeys(names, vllm), ours="grpo_core."):
        await BinaryCompletions(mock.AsyncMock())(scope, receive, send)
    return (sent[0]["status"], sent[1]["body"]) if sent else (0, b"")


def test_a_request_goes_to_the_engine_with_its_adapter_and_priority() -> None:
    async def work() -> None:
        engine = Engine()
        body = {"token_ids": [5], "sampling_params": {"seed": 3}, "model": "policy", "priority": -1}
        status, answer = await _ask(engine, body)
        assert (status, [each["token_ids"] for each in decode(answer)]) == (200, [[3], [4]])
        [asked] = engine.asked
        assert (asked["prompt"], asked["sampling"]["seed"]) == ([5], 3)
        assert (asked["lora_request"], asked["priority"]) == ("the adapter", -1)
        assert (await _ask(engine, {**body, "model": "other"}))[0] == 503  # a server that is not brought up to date yet
        assert (await _ask(engine, {**body, "token_ids": [5] * 9})) == (400, b"the prompt is too long")

    asyncio.run(work())


def test_a_request_whose_client_has_gone_is_ended() -> None:
    async def work() -> None:
        engine, gone = Engine(), asyncio.Event()
        status, _ = await _ask(engine, {"token_ids": [0], "sampling_params": {}}, gone)
        assert status == 0
        await asyncio.wait_for(engine.ended.wait(), 60)

    asyncio.run(work())


def test_other_requests_are_vllms() -> None:
    app = mock.AsyncMock()
    asyncio.run(BinaryCompletions(app)({"type": "http", "path": "/health"}, mock.Mock(), mock.Mock()))
    app.assert_awaited_once()
