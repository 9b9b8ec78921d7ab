"""Engines of vLLM for tests, and what the model itself says of the same tokens."""

from __future__ import annotations

import math
import random
from collections.abc import Generator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from grpo_core.environments.conversation import Sampled, Turn
from grpo_core.rollout.conversations import play
from grpo_core.rollout.types import Completion, Request, Sampling

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


def plain_logprobs(model: Any, ids: list[int], temperature: float = 1.0, penalty: float = 1.0) -> list[float]:
    """Log-probability of each token but the first, from one forward pass without anything around it."""
    return plain_distributions(model, ids, temperature, penalty)[range(len(ids) - 1), ids[1:]].tolist()


def plain_distributions(model: Any, ids: list[int], temperature: float, penalty: float = 1.0) -> Any:
    """Log-probabilities of what comes after each token but the last, with a repetition penalty on those up to it.
    (T - 1, V)"""
    import torch

    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, :-1].float()
    for place in range(len(logits)) if penalty != 1 else ():
        for token in {*ids[: place + 1]}:
            logits[place, token] *= 1 / penalty if logits[place, token] > 0 else penalty
    return (logits / temperature).log_softmax(-1)


def can_be_drawn(logprobs: list[float], sampling: Sampling) -> set[int]:
    """The tokens that min-p, then top-k, then top-p leave of a distribution."""
    likely = [i for i, each in enumerate(logprobs) if math.exp(each - max(logprobs)) >= sampling.min_p]
    ordered = sorted(likely, key=lambda i: -logprobs[i])[: sampling.top_k or None]
    p = [math.exp(logprobs[i]) for i in ordered]
    needed = next(n for n in range(1, len(p) + 1) if n == len(p) or sum(p[:n]) >= sampling.top_p * sum(p))
    return {*ordered[:needed]}


def logprob_when_drawn(token: int, logprobs: list[float], sampling: Sampling) -> float:
    """Log-probability of a token among those that min-p, then top-k, then top-p leave of a distribution."""
    return logprobs[token] - math.log(sum(math.exp(logprobs[i]) for i in can_be_drawn(logprobs, sampling) | {token}))


def cut(completions: list[Completion], texts: Sequence[str], prompts: list[list[int]], decode: Any) -> list[Completion]:
    """Each completion up to the token that completes one of these texts, as `Sampling.stop` ends it."""
    found = []
    for completion, prompt in zip(completions, prompts, strict=True):
        whole = range(1, len(completion.ids) + 1)
        written = {n: decode(prompt + completion.ids[:n]).removeprefix(decode(prompt)) for n in whole}
        end = next((n for n in whole if any(text in written[n] for text in texts)), None)
        found.append(
            completion
            if end is None
            else replace(completion, ids=completion.ids[:end], logprobs=completion.logprobs[:end], truncated=False)
        )
    return found


def start(run: Path) -> tuple[Any, Any, Any]:
    """The engine of a run directory's configuration, the model it was made for, the tokenizer."""
    import torch

    from grpo_core.config.files import load_config
    from grpo_core.data.prompts import load_tokenizer
    from grpo_core.model.loading import load_model, with_adapter
    from grpo_core.rollout.loading import make_engine

    config = load_config(run / "config.toml")
    torch.manual_seed(0)
    base = load_model(config.model.name_or_path, in_4bit=config.model.load_in_4bit)
    model, tokenizer = with_adapter(base, config.model), load_tokenizer(config.model)
    return make_engine(config, config.model.name_or_path, model, tokenizer, MAX_LENGTH), model, tokenizer
