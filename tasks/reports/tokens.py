"""Splits tokens into pieces of text, each with the figures that it is coloured by."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tasks.rendering.visible import visible

LEVELS = 8  # shades of a colour
LIMITS = {"surprise": 5.0, "ratio": 2.0, "entropy": 3.0}  # nats of the strongest shade; for a ratio, of its logarithm
MOST_TOKENS = 3000  # shown of a completion: two thirds from its beginning, one third from its end
LONGEST_CHARACTER = 8  # most tokens whose bytes may form one character
COLOURED_BY = {
    "advantage": "advantage of the completion",
    "surprise": "surprise: −log p when it was sampled, in nats",
    "age": "number of times the engine got new weights since it was sampled",
    "ratio": "ratio: p under the trained policy, divided by p when it was sampled",
    "entropy": "entropy of the trained policy where it stands, in nats",
}
COMPUTED = ("ratio", "entropy")  # computed on demand, since records do not contain them


@dataclass(frozen=True)
class Piece:
    """A token, or several whose bytes form one character. `levels`: shade for each colouring, from 0 to LEVELS,
    negative for a negative advantage or a ratio below 1; empty for tokens of the environment, which are not trained.
    `title`: the figures as text."""

    text: str
    levels: Mapping[str, int]
    title: str = ""


def coloured_pieces(row: Mapping[str, Any], tokenizer: Any, strongest: Mapping[str, float]) -> list[Piece]:
    """Colour the tokens of a row of completions/. `strongest`: advantage and age that get the strongest shade."""
    ids = row["completion_ids"]
    if len(ids) <= MOST_TOKENS:
        return [*_coloured(row, tokenizer, strongest, 0, len(ids))]
    tail = MOST_TOKENS // 3
    beginning = _coloured(row, tokenizer, strongest, 0, MOST_TOKENS - tail)
    end = _coloured(row, tokenizer, strongest, len(ids) - tail, len(ids))
    return [*beginning, Piece(f" … {len(ids) - MOST_TOKENS:,} more tokens … ", {}), *end]


def _coloured(
    row: Mapping[str, Any], tokenizer: Any, strongest: Mapping[str, float], start: int, stop: int
) -> Iterator[Piece]:
    """Colour the tokens from `start` to `stop`."""
    limits = {**LIMITS, **strongest}
    for text, first, last in _decoded(row["completion_ids"][start:stop], tokenizer):
        places = slice(start + first, start + last)
        if (masks := row.get("trained_tokens")) and not masks[start + first]:
            yield Piece(visible(text), {})
            continue
        surprise = -sum(row["sampling_logprobs"][places])
        figures, title = {"advantage": row["advantage"], "surprise": surprise}, f"p = {math.exp(-surprise):.3g}"
        if row.get("ages"):
            figures["age"] = float(max(row["ages"][places]))
            title += f", age {figures['age']:.0f}"
        if row.get("trained_logprobs"):
            figures["ratio"] = sum(row["trained_logprobs"][places]) + surprise
            figures["entropy"] = max(row["entropies"][places])
            title += f", ratio {math.exp(figures['ratio']):.3g}, entropy {figures['entropy']:.2f}"
        yield Piece(visible(text), {name: _level(it, limits.get(name, 0.0)) for name, it in figures.items()}, title)


def _level(value: float, strongest: float) -> int:
    if not strongest or not math.isfinite(value):
        return 0
    size = min(LEVELS, math.ceil(LEVELS * abs(value) / strongest))
    return size if value > 0 else -size


def _decoded(ids: Sequence[int], tokenizer: Any) -> Iterator[tuple[str, int, int]]:
    """Yield the text of each token, its index, and the index after it; tokens that only together form a character stay
    together."""

    def decode(some: Sequence[int]) -> str:
        return tokenizer.decode(some, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    first, before = 0, list[int]()  # some tokenizers drop the space of a text's first token
    for end in range(1, len(ids) + 1):
        piece = [*ids[first:end]]
        text = decode([*before, *piece]).removeprefix(decode(before))
        if text.endswith("\ufffd") and end - first < LONGEST_CHARACTER and end < len(ids):
            continue
        yield text, first, end
        first, before = end, piece
