"""Engines of vLLM for tests, and what the model itself says of the same tokens."""

from __future__ import annotations

import random
from collections.abc import Generator
from pathlib import Path
from typing import Any

from grpo_core.environments.conversation import Sampled, Turn
from grpo_core.rollout.conversations import play
from grpo_core.rollout.types import Request, Sampling

# A size at which vLLM packs its linear layers, so that the packed copy of a tied head goes stale on a reload.
PACKED = {"vocab_size": 2048, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4}
MAX_LENGTH = 300


def long_requests() -> list[Request]:
    """Prompts that fill blocks of vLLM's prefix cache (128 tokens on a CPU), together more than one step takes (4,096).

    Some begin alike.
    """
    draw = random.Random(0)
    starts = [[draw.randrange(3, 13) for _ in range(150)] for _ in range(12)]
    prompts = [start + [draw.randrange(3, 13) for _ in range(140)] for start in starts for _ in range(2)]
    return [Request(prompt, 2, seed=50_000 + 100 * i) for i, prompt in enumerate(prompts)]


def conversations(count: int) -> list[Generator[Turn, Sampled, list[Sampled]]]:
    """Conversations whose environment answers immediately; each prompt fills a block of vLLM's prefix cache."""

    def conversation(which: int) -> Generator[Turn, Sampled, list[Sampled]]:
        draw = random.Random(which)
        ids, turns = [draw.randrange(3, 13) for _ in range(130 + 5 * which)], list[Sampled]()
        for number in range(1 + which % 4):
            turns.append((yield Turn(ids, 2 + (which + number) % 7, number)))
            ids = ids + turns[-1].ids + [draw.randrange(3, 13) for _ in range(draw.randrange(1, 9))]
        return turns

    return [conversation(which) for which in range(count)]


def hold(engine: Any, together: int, count: int = 12) -> list[list[Sampled]]:
    """The turns of each conversation, so many conversations played together; one: turn by turn."""
    held: dict[int, Any] = {}
    for first in range(0, count, together):
        plays, seeds = conversations(count)[first : first + together], [1000 * i for i in range(count)][first:]
        for ended in play(engine, plays, seeds, Sampling(8, temperature=0.7)):  # type: ignore[arg-type]
            held |= {first + which: turns for which, turns in ended}
    return [held[which] for which in range(count)]


def sequences() -> list[list[int]]:
    """What is scored: from one token to all that an engine takes."""
    longest = [*long_requests()[0].prompt_ids, *range(3, 12)]
    assert len(longest) == MAX_LENGTH - 1
    return [longest, longest[:150], longest[40:57], longest[7:9], longest[:1]]


def plain_logprobs(model: Any, ids: list[int], temperature: float = 1.0) -> list[float]:
    """Log-probability of each token but the first, from one forward pass without anything around it."""
    return plain_distributions(model, ids, temperature)[range(len(ids) - 1), ids[1:]].tolist()


def plain_distributions(model: Any, ids: list[int], temperature: float) -> Any:
    """Log-probabilities of what comes after each token but the last. (T - 1, V)"""
    import torch

    with torch.no_grad():
        return (model(torch.tensor([ids])).logits[0, :-1] / temperature).log_softmax(-1)


def start(run: Path) -> tuple[Any, Any, Any]:
    """The engine of a run directory's configuration, the model it was made for, the tokenizer."""
    import torch

    from grpo_core.config.files import load_config
    from grpo_core.data.prompts import load_tokenizer
    from grpo_core.model.loading import load_model, with_adapter
    from grpo_core.rollout.factory import make_engine

    config = load_config(run / "config.toml")
    torch.manual_seed(0)
    base = load_model(config.model.name_or_path, in_4bit=config.model.load_in_4bit)
    model, tokenizer = with_adapter(base, config.model), load_tokenizer(config.model)
    return make_engine(config, config.model.name_or_path, model, tokenizer, MAX_LENGTH), model, tokenizer
