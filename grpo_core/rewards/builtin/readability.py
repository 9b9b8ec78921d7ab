"""Reward for a text of a given school grade."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from grpo_core.data.chat import text_of
from grpo_core.rewards.builtin.record import BuiltinReward, Rewards
from grpo_core.rewards.builtin.words import words

SENTENCE = re.compile(r"[^.!?]+[.!?]*")
READABLE_WORDS = 20  # fewer say nothing about a grade
GRADES_OUTSIDE = 5  # where `readability` has fallen to 0


def readability(completions: Sequence[Any], low: float, high: float) -> list[float | None]:
    """1 if the text's US school grade is from `low` to `high`, falling linearly to 0 five grades outside.

    The grade is the Automated Readability Index. It is made for English and, unlike Flesch's, needs no dictionary of
    syllables. Sentences of one or two words are left out. A text of fewer than 20 words, too few for a grade, gets 0.
    """
    if low > high:
        raise ValueError(f"low={low:g} is above high={high:g}: no grade lies between them")
    rewards: list[float | None] = []
    for completion in completions:
        sentences = [sentence for sentence in SENTENCE.findall(text_of(completion)) if len(words(sentence)) > 2]
        if sum(len(words(sentence)) for sentence in sentences) < READABLE_WORDS:
            rewards.append(0.0)
            continue
        grade = automated_readability_index(sentences)
        outside = max(low - grade, grade - high, 0.0)
        rewards.append(max(0.0, 1.0 - outside / GRADES_OUTSIDE))
    return rewards


def automated_readability_index(sentences: Sequence[str]) -> float:
    """US school grade = 4.71 · characters / words + 0.5 · words / sentences - 21.43, of sentences with their spaces.

    Senter & Smith 1967, Automated Readability Index, AMRL-TR-66-220 (Wright-Patterson Air Force Base). Words are what
    spaces separate, and punctuation marks are characters: the paper counts the strokes of a typewriter.
    """
    separated = "".join(sentences).split()
    characters, count = sum(map(len, separated)), len(separated)
    return 4.71 * characters / count + 0.5 * count / len(sentences) - 21.43


REWARDS: Rewards = {
    "readability": BuiltinReward(readability, (0.0, 1.0), looks_at_text_only=True),
}
