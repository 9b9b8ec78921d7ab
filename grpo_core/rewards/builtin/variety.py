"""Rewards for the quality of a text: nearness to a reference, variety, readability."""

from __future__ import annotations

import functools
import json
import re
from collections import defaultdict
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from grpo_core.data.chat import text_of
from grpo_core.rewards.builtin.words import ngrams, words
from grpo_core.rewards.types import BuiltinReward, Rewards

ROUGE = ("rouge1", "rouge2", "rougeL", "rougeLsum")
SENTENCE = re.compile(r"[^.!?]+[.!?]*")
READABLE_WORDS = 20  # fewer say nothing about a grade
GRADES_OUTSIDE = 5  # where `readability` has fallen to 0


def rouge(completions: Sequence[Any], reference: Sequence[str], kind: str = "rougeL") -> list[float | None]:
    """ROUGE F-measure, from 0 to 1, of the completion against the text in the column `reference`.

    Lin 2004 (aclanthology.org/W04-1013), computed by rouge-score; `kind`: rouge1, rouge2 (n-grams), rougeL (longest
    common subsequence) or rougeLsum (the same by lines). Words of any script, not stemmed. None if the reference has no
    words.
    """
    if kind not in ROUGE:
        raise ValueError(f"kind={kind!r} is none of {', '.join(ROUGE)}")
    scorer = _rouge_scorer(kind)
    return [
        scorer.score(expected, text_of(completion))[kind].fmeasure if expected and words(expected) else None
        for completion, expected in zip(completions, reference, strict=True)
    ]


@functools.cache
def _rouge_scorer(kind: str) -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    # The library's own tokenizer knows a to z and digits only: a reference in Greek would have no words.
    return RougeScorer([kind], tokenizer=SimpleNamespace(tokenize=words))


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
    "rouge": BuiltinReward(rouge, (0.0, 1.0), looks_at_text_only=True, extra="rewards", modules=("rouge_score",)),
    "distinct_n": BuiltinReward(distinct_n, (0.0, 1.0), looks_at_text_only=True),
    "self_repetition": BuiltinReward(self_repetition, (-1.0, 0.0), looks_at_text_only=True),
    "readability": BuiltinReward(readability, (0.0, 1.0), looks_at_text_only=True),
}
