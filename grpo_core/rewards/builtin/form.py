"""Rewards for a completion's form: pattern, tags, length, language, repetition."""

from __future__ import annotations

import functools
import re
import textwrap
from collections.abc import Sequence
from typing import Any

from grpo_core.data.chat import text_of
from grpo_core.rewards.builtin.words import ngrams, words
from grpo_core.rewards.types import BuiltinReward, Rewards

LANGUAGE_PIECE = 100  # characters: enough to tell languages apart, few enough to find a change of language


def format_regex(completions: Sequence[Any], pattern: str) -> list[float | None]:
    """1 if the whole completion matches `pattern` (a dot matches line ends too), else 0."""
    expression = re.compile(pattern, re.DOTALL)
    return [float(expression.fullmatch(text_of(completion)) is not None) for completion in completions]


def tags(completions: Sequence[Any], tags: Sequence[str] = ("think", "answer")) -> list[float | None]:
    """Share of `tags` that are in place, from 0 to 1; 1 for `<think>…</think><answer>…</answer>`.

    A tag is in place if `<tag>` and `</tag>` occur exactly once each, in this order, with text between them, and after
    the end of the tags before it. Text outside of tags is allowed; `format_regex` looks at the whole completion.
    """
    if not tags or isinstance(tags, str) or len(set(tags)) < len(tags):
        raise ValueError(f"tags={tags!r} must be a list of different names")
    return [_tags_in_place(text_of(completion), tags) / len(tags) for completion in completions]


def _tags_in_place(text: str, tags: Sequence[str]) -> int:
    end = count = 0
    for tag in tags:
        opening, closing = f"<{tag}>", f"</{tag}>"
        if text.count(opening) == text.count(closing) == 1:
            start, stop = text.index(opening), text.index(closing)
            if end <= start < stop and text[start + len(opening) : stop].strip():
                end = stop + len(closing)
                count += 1
    return count


def length(completion_ids: Sequence[Sequence[int]], target: int) -> list[float | None]:
    """1 at `target` tokens (the end token counts), falling linearly to 0 at none and at twice the target."""
    return [max(0.0, 1.0 - abs(len(ids) - target) / target) for ids in completion_ids]


def length_band(completion_ids: Sequence[Sequence[int]], low: int, high: int) -> list[float | None]:
    """1 from `low` to `high` tokens (the end token counts), falling linearly to 0 at none and at twice `high`."""
    if not 0 <= low <= high or high == 0:
        raise ValueError(f"low={low}, high={high}: the band must not be empty, and begin at 0 or above")
    return [len(ids) / low if len(ids) < low else max(0.0, min(1.0, 2.0 - len(ids) / high)) for ids in completion_ids]


def char_length(completions: Sequence[Any], target: int) -> list[float | None]:
    """-|target - characters|, at most 0: the reward of the first example in TRL's documentation, there with 20."""
    return [-abs(float(target - len(text_of(completion)))) for completion in completions]


def soft_overlong_punishment(
    completion_ids: Sequence[Sequence[int]], max_completion_len: int, soft_punish_cache: int
) -> list[float | None]:
    """0 up to `max_completion_len - soft_punish_cache` tokens, then falling linearly to -1 at `max_completion_len`.

    DAPO, arXiv:2503.14476, equation 13. Set `max_completion_len` to rollout.max_completion_length, and
    `soft_punish_cache` to the number of tokens before it that are penalised (the paper: 4096 of 20480).
    """
    if not 0 < soft_punish_cache <= max_completion_len:
        raise ValueError(
            f"soft_punish_cache={soft_punish_cache} must be between 1 and max_completion_len={max_completion_len}"
        )
    free = max_completion_len - soft_punish_cache
    return [-min(max(len(ids) - free, 0) / soft_punish_cache, 1.0) for ids in completion_ids]


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


REWARDS: Rewards = {
    "format_regex": BuiltinReward(format_regex, (0.0, 1.0), looks_at_text_only=True),
    "tags": BuiltinReward(tags, (0.0, 1.0), looks_at_text_only=True),
    "length": BuiltinReward(length, (0.0, 1.0), looks_at_text_only=True),
    "length_band": BuiltinReward(length_band, (0.0, 1.0), looks_at_text_only=True),
    "char_length": BuiltinReward(char_length, (-float("inf"), 0.0), looks_at_text_only=True),
    "soft_overlong_punishment": BuiltinReward(soft_overlong_punishment, (-1.0, 0.0), looks_at_text_only=True),
    "language": BuiltinReward(language, (0.0, 1.0), looks_at_text_only=True, extra="rewards", modules=("py3langid",)),
    "repetition": BuiltinReward(repetition, (-1.0, 0.0), looks_at_text_only=True),
}
