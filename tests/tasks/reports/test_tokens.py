"""Tokens are coloured by what was recorded of them, and together are the text that was sampled."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tasks.rendering.visible import visible
from tasks.reports.tokens import LEVELS, LIMITS, MOST_TOKENS, coloured_pieces
from tests.made_up import sampled

SURPRISING = LIMITS["surprise"]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """One token per byte, so that most characters are several tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    found = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    found.pre_tokenizer, found.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=found)


def _row(ids: list[int], **columns: Any) -> dict[str, Any]:
    return sampled(1, 0, {"numeric_match": 1.0}, completion_ids=ids, **columns)


@pytest.mark.slow
@given(text=st.text(max_size=60).filter(lambda text: "\ufffd" not in text))
def test_the_pieces_are_the_text_and_their_surprise_is_that_of_all_its_tokens(tokenizer: Any, text: str) -> None:
    ids = tokenizer(text)["input_ids"]
    logprobs = [-0.01 * (place + 1) for place in range(len(ids))]
    pieces = coloured_pieces(_row(ids, sampling_logprobs=logprobs, advantage=1.0), tokenizer, {"advantage": 1.0})
    assert "".join(piece.text for piece in pieces) == "".join(map(visible, text))
    assert len(pieces) == len(text)  # one per character
    together = math.prod(float(piece.title.removeprefix("p = ")) for piece in pieces)
    assert together == pytest.approx(math.exp(sum(logprobs)), rel=0.2)  # titles are rounded to three digits


def test_shades_follow_the_recorded_figures_and_what_was_not_trained_has_none(tokenizer: Any) -> None:
    ids = tokenizer("abcdef")["input_ids"]
    row = _row(
        ids,
        sampling_logprobs=[0.0, -SURPRISING / 2, -SURPRISING, -99.0, 0.0, -0.01],
        trained_tokens=[1, 1, 1, 1, 0, 1],
        ages=[0, 0, 1, 2, 0, 4],
        advantage=-0.5,
    )
    pieces = coloured_pieces(row, tokenizer, {"advantage": 1.0, "age": 4.0})
    levels = [piece.levels for piece in pieces]
    assert [it.get("surprise") for it in levels] == [0, LEVELS // 2, LEVELS, LEVELS, None, 1]
    assert [it.get("age") for it in levels] == [0, 0, 2, 4, None, 8]
    assert [it.get("advantage") for it in levels] == [-LEVELS // 2] * 4 + [None] + [-LEVELS // 2]


def test_ratio_and_entropy_of_the_trained_policy_colour_where_they_were_computed(tokenizer: Any) -> None:
    row = _row(
        tokenizer("abc")["input_ids"],
        sampling_logprobs=[-1.0, -3.0, -0.5],
        trained_logprobs=[-1.0, -1.0, -4.5],
        entropies=[0.0, 1.5, 3.0],
        advantage=1.0,
    )
    pieces = coloured_pieces(row, tokenizer, {"advantage": 1.0})
    assert [piece.levels["ratio"] for piece in pieces] == [0, LEVELS, -LEVELS]
    assert [piece.levels["entropy"] for piece in pieces] == [0, LEVELS // 2, LEVELS]
    assert [piece.title.split(", ")[1] for piece in pieces] == ["ratio 1", "ratio 7.39", "ratio 0.0183"]


def test_of_a_long_completion_the_beginning_and_the_end_are_shown(tokenizer: Any) -> None:
    ids = tokenizer("a" * 10_000 + "z")["input_ids"]
    pieces = coloured_pieces(_row(ids), tokenizer, {})
    assert len(pieces) == MOST_TOKENS + 1
    assert pieces[-1].text == "z"
    [gap] = [piece.text for piece in pieces if not piece.levels]
    assert gap == f" … {10_001 - MOST_TOKENS:,} more tokens … "
