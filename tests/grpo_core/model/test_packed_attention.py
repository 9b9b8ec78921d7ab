"""Attention of a packed batch, by every kind of it, is that of each sequence alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch.nn.attention import flex_attention

from grpo_core.model import packed_attention
from grpo_core.model.packed_attention import attend, pack_batch
from grpo_core.model.sequences import Sequences, pad
from tests.plain_kernels import plain_flex, plain_varlen

# Each row: the number of its prompt, whose length is one more, and the length of its completion.
ROWS = st.lists(st.tuples(st.integers(0, 4), st.integers(1, 7) | st.just(20)), min_size=1, max_size=8)
HEADS = st.sampled_from([(1, 1), (4, 1), (4, 2), (3, 3)])  # of queries, of keys
SIZE = 8


def _attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Each query after all keys that come before the first of them: (H, T, d), (K, S, d), (K, S, d) → (H, T, d)"""
    mask = torch.ones(query.shape[1], key.shape[1], dtype=torch.bool).tril(key.shape[1] - query.shape[1])
    copies = len(query) // len(key)
    scores = query @ key.repeat_interleave(copies, 0).transpose(1, 2) * 0.3
    return scores.masked_fill(~mask, -torch.inf).softmax(-1) @ value.repeat_interleave(copies, 0)


def _row_by_row(rows: list[tuple[int, int]], query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Sequence by sequence. (H, N, d), (K, N, d), (K, N, d) → (N, H, d)"""
    places, found = {}, []
    start = 0
    for prompt in dict.fromkeys(prompt for prompt, _ in rows):
        places[prompt] = torch.arange(start, start + prompt + 1)
        found.append(_attention(*(x[:, places[prompt]] for x in (query, key, value))))
        start += prompt + 1
    for prompt, completion in rows:
        own = torch.arange(start, start + completion - 1)
        seen = torch.cat([places[prompt], own])
        found.append(_attention(query[:, own], key[:, seen], value[:, seen]))
        start += len(own)
    return torch.cat(found, dim=1).transpose(0, 1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["padded", "varlen", "flex"])
@settings(max_examples=60)
@given(ROWS, HEADS, st.integers(0, 2**32))
def test_packed_attention_and_its_gradient_are_those_of_each_sequence_alone(
    kind: Any, rows: list[tuple[int, int]], heads: tuple[int, int], seed: int
) -> None:
    ids = pad([[1] * (1 + prompt + completion) for prompt, completion in rows], torch.int64)
    numbers, completions = torch.tensor(rows).T
    batch = pack_batch(Sequences(ids, numbers + 1, completions, numbers), kind)
    used = sum(prompt + 1 for prompt in {prompt for prompt, _ in rows}) + int((completions - 1).sum())
    length = batch.input_ids.shape[1]
    assert length == (max(-(-used // 128) * 128, 256) if kind == "flex" else used)
    torch.manual_seed(seed)
    q, k, v = (torch.randn(n, length, SIZE, requires_grad=True) for n in (heads[0], heads[1], heads[1]))
    weight = torch.randn(used, heads[0], SIZE)
    expected = _row_by_row(rows, q, k, v)
    gradients = torch.autograd.grad((expected * weight).sum(), (q, k, v))

    attention: Any = batch.attention
    if kind == "flex":
        attention = packed_attention._block_mask(attention.prompt, attention.completion)
    with (
        mock.patch.object(packed_attention, "_flex", plain_flex),
        mock.patch.object(packed_attention, "varlen_attn", plain_varlen),
    ):
        found = attend(nn.Module(), q[None], k[None], v[None], None, packed=attention, scaling=0.3)[0][0, :used]
    assert torch.allclose(found, expected, atol=1e-5)
    for mine, bare in zip(torch.autograd.grad((found * weight).sum(), (q, k, v)), gradients, strict=True):
        assert torch.allclose(mine, bare, atol=1e-4)


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """How often attention and mask were compiled, as on a GPU except for what compiles what dynamo has traced."""
    counted: Counter[str] = Counter()
    compile_ = torch.compile

    def counting(function: Callable[..., Any], **options: Any) -> Any:
        name = "mask" if function is flex_attention.create_block_mask else "attention"

        def backend(graph: Any, _: Any) -> Any:
            counted[name] += 1
            return graph.forward

        return compile_(function, backend=backend, **options)

    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    monkeypatch.setattr(torch, "compile", counting)
    made = packed_attention._flex.__wrapped__(0.3, True), packed_attention._create_block_mask.__wrapped__(True)
    monkeypatch.setattr(packed_attention, "_flex", lambda *_: made[0])
    monkeypatch.setattr(packed_attention, "_create_block_mask", lambda _: made[1])
    torch._dynamo.reset()
    yield counted
    torch._dynamo.reset()


def _pass(prompts: int, *, grad: bool, trainable: bool) -> None:
    """Attention of one packed batch of this many prompts of 30 tokens with two completions of 21 each."""
    ids = torch.ones(2 * prompts, 51, dtype=torch.int64)
    lengths = torch.tensor([[30, 21]]).repeat(2 * prompts, 1).T
    batch: Any = pack_batch(Sequences(ids, *lengths, torch.arange(2 * prompts) // 2), "flex")
    q, k, v = (torch.randn(1, n, batch.input_ids.shape[1], SIZE, requires_grad=trainable) for n in (8, 8, 8))
    with torch.set_grad_enabled(grad):
        mask = packed_attention._block_mask(batch.attention.prompt, batch.attention.completion)
        found, _ = attend(nn.Module(), q, k, v, None, packed=mask)
        if found.requires_grad:
            found.sum().backward()


@pytest.mark.slow
def test_flex_attention_is_compiled_once_for_all_lengths_in_training_scoring_and_a_frozen_model(
    compilations: Counter[str],
) -> None:
    for grad, trainable in ((True, False), (True, True), (False, False)):
        for prompts in (1, 2, 5, 12):
            _pass(prompts, grad=grad, trainable=trainable)
    assert compilations == {"mask": 1, "attention": 3}, "as many heads as blocks would make it one more"


@pytest.mark.slow
def test_flex_attention_past_dynamo_s_limit_is_an_error_and_not_all_scores(
    compilations: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_attention, "_create_block_mask", lambda _: flex_attention.create_block_mask)
    with torch._dynamo.config.patch(recompile_limit=1):
        _pass(2, grad=True, trainable=True)
        with pytest.raises(FailOnRecompileLimitHit):
            _pass(2, grad=False, trainable=False)


def test_completions_are_padded_to_others_of_like_length_alone() -> None:
    """The longest, and those longer than three quarters of it; then the longest of the others. As inputs, completions
    are one token shorter."""
    lengths = torch.tensor([101, 5, 81, 76, 1, 61, 60, 5])
    prompts = torch.tensor([9, 9, 9, 3, 3, 3, 3, 3])
    ids = torch.zeros(len(lengths), int((prompts + lengths).max()), dtype=torch.int64)
    attention: Any = pack_batch(Sequences(ids, prompts, lengths, (prompts == 3).long()), "padded").attention
    assert [tuple(block.mask.shape) for block in attention.completions] == [
        (2, 1, 100, 109),
        (3, 1, 75, 78),
        (2, 1, 4, 13),
    ]
    assert sorted(attention.by_block.tolist()) == [*range(int((lengths - 1).sum()))]
