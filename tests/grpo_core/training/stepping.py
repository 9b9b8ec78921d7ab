"""Random valid plans, stepped through by the real loop with a model of four numbers; what was done is counted.

Counted where it happens: requests at the engine, micro-steps as they are put together, steps at the optimizer.
"""

from __future__ import annotations

import math
import random
from collections.abc import Generator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from accelerate import Accelerator

from grpo_core.config.files import parse_config
from grpo_core.data.curriculum import no_rates
from grpo_core.data.prompts import Prompts
from grpo_core.model import saving
from grpo_core.model.policy import Policy
from grpo_core.planning.plan import make_plan, plan_inputs
from grpo_core.planning.sampling_ahead import choose_groups
from grpo_core.rewards.contract import resolve
from grpo_core.rollout.collect import Scoring
from grpo_core.rollout.types import Completion, Finished, Request, Sampling
from grpo_core.training import loop as trainer
from grpo_core.training.out_of_memory import OutOfMemoryRetry
from grpo_core.training.session import Sampler, Session
from grpo_core.training.sync_probe import Probe
from tests.conftest import config_values


class FourLogits(torch.nn.Module):
    """The same four logits at every position."""

    generation_config = None

    def __init__(self) -> None:
        super().__init__()
        self.logits = torch.nn.Parameter(torch.zeros(4))

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> Any:
        return SimpleNamespace(logits=self.logits.expand(*input_ids.shape, 4))

    def save_pretrained(self, folder: Path) -> None:
        pass


class CountingEngine:
    """Answers each request with completions of one or two tokens, and keeps the requests."""

    def __init__(self, model: FourLogits):
        self.model = model
        self.rollouts: list[list[Request]] = []
        self.now = 0  # hand-overs of weights
        self.begun: dict[int, tuple[int, int, float]] = {}  # when, until when, and when it would be finished, by seed
        self.started: list[int] = []  # seeds
        self.ages: list[int] = []  # of the groups that were taken
        self.notes: list[str] = []

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Generator[list[Finished], None, None]:
        self.rollouts.append(list(requests))
        logprob = self.model.logits.detach().log_softmax(0)[3].item()
        for number, request in enumerate(requests):
            lengths = [1 + (request.seed + i) % 2 for i in range(request.num_completions)]
            yield [(number, [Completion([3] * length, [logprob] * length, truncated=False) for length in lengths])]

    def begin(self, requests: Sequence[Request], sampling: Sampling, max_staleness: int) -> None:
        """Each is sampled for a time of its own, in hand-overs of weights; a few take very long."""
        for request in requests:
            if request.seed not in self.begun:
                end = self.now + random.Random(request.seed).paretovariate(0.25)
                self.begun[request.seed] = (self.now, self.now + max_staleness, end)
                self.started.append(request.seed)

    def take(
        self, requests: Sequence[Request], sampling: Sampling, count: int
    ) -> Generator[list[Finished], None, None]:
        assert len(requests) == len(self.begun)  # no other is left behind
        by_end = sorted(range(len(requests)), key=lambda number: self.begun[requests[number].seed][2])
        due = {number: self.begun[request.seed][1] for number, request in enumerate(requests)}
        taken = choose_groups(by_end, due, self.now, count, count)
        assert len(taken) == count  # all of them, however long they take
        for number in taken:
            start, last, _ = self.begun.pop(requests[number].seed)
            assert self.now <= last
            self.ages.append(self.now - start)
        yield []
        generated = self.generate([requests[number] for number in taken], sampling)
        yield [(taken[number], found) for ((number, found),) in generated]

    def drop_begun(self) -> None:
        self.begun.clear()

    def compute_logprobs(self, sequences: Sequence[list[int]]) -> list[list[float]]:
        logprobs = self.model.logits.detach().log_softmax(0).tolist()
        return [[logprobs[token] for token in ids[1:]] for ids in sequences]

    def sync_weights(self, model: torch.nn.Module) -> str:
        self.now += 1
        return "shared"

    def close(self) -> None:
        pass


class Tokenizer:
    eos_token_id = 3

    def batch_decode(self, ids: Sequence[list[int]], skip_special_tokens: bool) -> list[str]:
        return ["x" * len(row) for row in ids]

    def get_vocab(self) -> dict[str, int]:
        return {}

    def save_pretrained(self, folder: Path) -> None:
        pass


def random_settings(seed: int, num_processes: int) -> dict[str, Any]:
    """A valid plan's keys and its number of prompts; a group may straddle processes, an update rollouts."""
    draw = random.Random(seed)
    b, g = draw.randint(1, 6), draw.randint(2, 6)
    s = g // math.gcd(b * num_processes, g) * draw.randint(1, 2)
    batch = {"steps_per_generation": s}
    if draw.random() < 0.3:
        batch = {"generation_batch_size": b * num_processes * s}
    elif draw.random() < 0.3:
        batch = {"gradient_accumulation_steps": s}
    keys = {
        "num_generations": g,
        "per_device_train_batch_size": b,
        "num_processes": num_processes,
        "gradient_accumulation_steps": draw.randint(1, 5),
        "num_iterations": draw.randint(1, 3),
        "num_train_epochs": draw.choice([0.3, 1.0, 1.7, 2.0]),
        "max_steps": draw.choice([None, None, draw.randint(1, 12)]),
        **batch,
    }
    return {"keys": keys, "num_prompts": b * num_processes * s // g + draw.randint(0, 8)}


def step_through(settings: dict[str, Any], accelerator: Accelerator, folder: Path) -> dict[str, Any]:
    """Train as set, into a folder of all processes; what this one's engine, model and optimizer were asked to do."""
    values = config_values(Path("model"), Path("data"), **{"max_steps": None, **settings["keys"]})
    values["data"]["curriculum"] = settings.get("curriculum", {})
    config = parse_config({**values, "evaluation": {"accuracy_reward": "length"}})  # whose values differ here
    plan = make_plan(plan_inputs(config, settings["num_prompts"]))
    model = FourLogits()
    engine, policy = CountingEngine(model), Policy(model, 1.0)
    optimizer = torch.optim.SGD(model.parameters())
    steps = mock.Mock(side_effect=optimizer.step)
    optimizer.step = steps
    rows = range(plan.num_prompts)
    session = Session(
        config=config,
        plan=plan,
        accelerator=accelerator,
        prompts=Prompts([{"prompt": "p", "answer": "0"} for _ in rows], [[row, 1] for row in rows], 2),
        held_out=None,
        scoring=Scoring(Tokenizer(), [resolve(reward) for reward in config.rewards]),
        model=model,
        policy=policy,
        reference=None,
        optimizer=optimizer,
        learning_rate=lambda updates: 0.01,
        sampler=Sampler(engine, engine if config.rollout.max_staleness else None, Probe([[0]], [[1]], "no")),
        memory=OutOfMemoryRetry(1000, policy),  # a pass an update: passes are not counted
        rates=no_rates(plan.num_prompts),
    )
    with (
        mock.patch.object(trainer, "load_session", return_value=session),
        mock.patch.object(trainer, "fingerprint", return_value=""),
        mock.patch.object(trainer, "rehearse_end"),  # of a model that transformers does not know
        mock.patch.object(saving, "_carry_over"),
        mock.patch.object(accelerator, "end_training"),
        mock.patch.object(trainer, "update_batch", wraps=trainer.update_batch) as batches,
    ):
        result = trainer.train(folder, folder)
    return {
        "updates": steps.call_count,
        "micro_steps": sum(len(call.args[0]) for call in batches.call_args_list),
        "rollouts": [[[r.prompt_ids[0], r.num_completions] for r in requests] for requests in engine.rollouts],
        "result": result["counted"],
        "left": len(engine.begun),
        "ages": engine.ages,
        "started": engine.started,
    }
