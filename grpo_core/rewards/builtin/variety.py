"""Rewards for variety, by n-grams of words: within a completion, and between the completions of a prompt."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from grpo_core.data.chat import text_of
from grpo_core.rewards.builtin.record import BuiltinReward, Rewards
from grpo_core.rewards.builtin.words import ngrams, words


def repetition(completions: Sequence[Any], n: int = 4) -> list[float | None]:
    """Minus the share of the completion's n-grams of words that occur earlier in it: 0 without repetition, towards -1.

    The n-gram repetition penalty (arXiv:2502.03373). It is counted twice, with and without punctuation marks and emoji
    as words; the lower value counts. Case is ignored, and in scripts without spaces each character is a word.
    """
    return [
        min(_repeated(ngrams(words(text_of(completion), signs), n)) for signs in (False, True))
        for completion in completions
    ]


def _repeated(grams: list[tuple[str, ...]]) -> float:
    return len(set(grams)) / len(grams) - 1.0 if grams else 0.0


def distinct_n(completions: Sequence[Any], n: int = 2, minimum: int = 20) -> list[float | None]:
    """Different n-grams of words over all n-grams of the completion, from 0 to 1 (distinct-n, arXiv:1510.03055).

    A completion with fewer than `minimum` n-grams counts as if it had that many, the missing ones being repetitions: a
    short text is not a varied one.
    """
    if minimum < 1:
        raise ValueError(f"minimum={minimum} must be at least 1")
    found = [ngrams(words(text_of(completion)), n) for completion in completions]
    return [len(set(grams)) / max(len(grams), minimum) for grams in found]


def self_repetition(prompts: Sequence[Any], completions: Sequence[Any], n: int = 3) -> list[float | None]:
    """Minus the share of the completion's n-grams of words that another completion of the same prompt has too, mean
    over the others: 0 if it is unlike all of them, -1 if all are the same.

    The idea is Self-BLEU's (arXiv:1802.01886). Also -1 for a completion without an n-gram: saying nothing is not being
    different. None if the prompt has one completion only. Completions are compared within one process.
    """
    found = [set(ngrams(words(text_of(completion)), n)) for completion in completions]
    groups: dict[str, list[int]] = defaultdict(list)
    for i, prompt in enumerate(prompts):
        groups[json.dumps(prompt, sort_keys=True, default=str)].append(i)
    rewards: list[float | None] = [None] * len(found)
    for group in groups.values():
        for i in group if len(group) > 1 else ():
            shared = sum(len(found[i] & found[j]) for j in group if j != i)
            rewards[i] = -shared / (len(found[i]) * (len(group) - 1)) if found[i] else -1.0
    return rewards


REWARDS: Rewards = {
    "repetition": BuiltinReward(repetition, (-1.0, 0.0), looks_at_text_only=True),
    "distinct_n": BuiltinReward(distinct_n, (0.0, 1.0), looks_at_text_only=True),
    "self_repetition": BuiltinReward(self_repetition, (-1.0, 0.0), looks_at_text_only=True),
}
