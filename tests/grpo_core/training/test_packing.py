"""An update's rows go through the model in parts as large as the token budget allows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_core.model.sequences import Sequences, pack, pad

# Each row: the number of its prompt, the length of its completion.
ROWS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9) | st.just(40)), min_size=1, max_size=12)


def _fits(rows: list[tuple[int, int]], tokens: int, share_prompts: bool) -> bool:
    """May these rows (prompt of 1 + number tokens, completion's length) be one part?"""
    lengths = [1 + prompt + completion for prompt, completion in rows]
    if share_prompts:
        size = sum(1 + prompt for prompt in {prompt for prompt, _ in rows}) + sum(length for _, length in rows)
    else:
        size = len(rows) * max(lengths)
    return size <= tokens and len(rows) * max(length for _, length in rows) <= 2 * tokens


@pytest.mark.slow
@settings(max_examples=20 * settings.default.max_examples)
@given(ROWS, st.integers(1, 90), st.booleans())
def test_parts_hold_every_row_once_and_as_many_as_the_budget_allows(
    rows: list[tuple[int, int]], tokens: int, share_prompts: bool
) -> None:
    ids = [[prompt] * (1 + prompt) + [9] * completion for prompt, completion in rows]
    prompt_lengths, completion_lengths = torch.tensor([(1 + prompt, completion) for prompt, completion in rows]).T
    sequences = Sequences(pad(ids, torch.int64), prompt_lengths, completion_lengths, torch.tensor(rows)[:, 0])
    parts = [part.tolist() for part in pack(sequences, tokens, share_prompts=share_prompts)]
    assert sorted(row for part in parts for row in part) == list(range(len(rows)))
    for number, part in enumerate(parts):
        assert len(part) == 1 or _fits([rows[row] for row in part], tokens, share_prompts)
        if number + 1 < len(parts):
            assert not _fits([rows[row] for row in [*part, parts[number + 1][0]]], tokens, share_prompts)
