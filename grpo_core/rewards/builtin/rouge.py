"""Reward for nearness to a reference text."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from grpo_core.data.chat import text_of
from grpo_core.rewards.builtin.record import BuiltinReward, Rewards
from grpo_core.rewards.builtin.words import words

ROUGE = ("rouge1", "rouge2", "rougeL", "rougeLsum")


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


REWARDS: Rewards = {
    "rouge": BuiltinReward(rouge, (0.0, 1.0), looks_at_text_only=True, extra="rewards", modules=("rouge_score",)),
}
