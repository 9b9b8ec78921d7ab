"""Reward for writing in a given language."""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Sequence
from typing import Any

from grpo_core.data.chat import text_of
from grpo_core.rewards.builtin.record import BuiltinReward, Rewards

LANGUAGE_PIECE = 100  # characters: enough to tell languages apart, few enough to find a change of language


def language(completions: Sequence[Any], language: str) -> list[float | None]:
    """Probability, from 0 to 1, that the text is in `language` (ISO 639-1: "en"), by py3langid; 0 without any letter.

    The mean over pieces of about 100 characters, so that a text that changes its language half-way gets about a half;
    the probability of the whole would hide that. With fewer than a dozen words it is a guess.
    """
    identifier = _language_identifier()
    if language not in identifier.labels:
        raise ValueError(f"language={language!r} is unknown to py3langid; it knows {', '.join(identifier.labels)}")
    return [_language_share(text_of(completion), language, identifier) for completion in completions]


def _language_share(text: str, language: str, identifier: Any) -> float:
    lettered = [piece for piece in textwrap.wrap(text, LANGUAGE_PIECE) if any(map(str.isalpha, piece))]
    if not lettered:
        return 0.0
    found = [min(1.0, dict(identifier.rank(piece))[language]) * len(piece) for piece in lettered]
    return sum(found) / sum(map(len, lettered))


@functools.cache
def _language_identifier() -> Any:
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)


REWARDS: Rewards = {
    "language": BuiltinReward(language, (0.0, 1.0), looks_at_text_only=True, extra="rewards", modules=("py3langid",)),
}
