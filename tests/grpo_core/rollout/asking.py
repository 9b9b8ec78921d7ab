"""Requests to an engine behind pretended servers, and the answers that any of them would give."""

from __future__ import annotations

import threading

import torch

from grpo_core.rollout.types import Completion, Request, Sampling
from grpo_core.rollout.vllm.server_engine import VLLMServerEngine
from tests.grpo_core.rollout.pretend_vllm import plain_ids

SAMPLING = Sampling(4, 1.0)


class Asking:
    """Requests that a thread asks an engine for: `ids` by request once `join` has returned, or the error raised."""

    def __init__(self, engine: VLLMServerEngine, requests: list[Request]):
        self.found: dict[int, list[Completion]] = {}
        self.thread = threading.Thread(target=self._work, args=(engine, requests), daemon=True)
        self.thread.start()

    def _work(self, engine: VLLMServerEngine, requests: list[Request]) -> None:
        for step in engine.generate(requests, SAMPLING):
            self.found |= dict(step)

    def join(self) -> list[list[list[int]]]:
        self.thread.join(60)
        assert not self.thread.is_alive()
        return [[each.ids for each in group] for _, group in sorted(self.found.items())]


def requests(count: int, completions: int = 1) -> list[Request]:
    return [Request([3 + number, 4], completions, 100 * number) for number in range(count)]


def plain(asked: list[Request]) -> list[list[list[int]]]:
    return [
        [plain_ids(each.prompt_ids, each.seed + number, SAMPLING.max_tokens) for number in range(each.num_completions)]
        for each in asked
    ]


def ask(engine: VLLMServerEngine, asked: list[Request]) -> None:
    assert Asking(engine, asked).join() == plain(asked)


def model(value: float = 1.0) -> torch.nn.Linear:
    linear = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(linear.weight, value)
    return linear


def wait_until_back(engine: VLLMServerEngine) -> None:
    async def back() -> None:
        for task in [*engine.router.bringing_back.values()]:
            await task

    engine._run(back())
    assert len(engine.router.up) == len(engine.servers)
