"""Passes shrink when memory runs out, by what the largest of them held."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from grpo_core.errors import TrainingError
from grpo_core.model.loading import load_model
from grpo_core.model.policy import Policy
from grpo_core.model.sequences import Sequences
from grpo_core.training.memory import OutOfMemoryRetry

LENGTHS = [10, 40, 10, 10, 20, 10]  # with prompts of 2 tokens


@pytest.fixture
def policy(model_folder: Path) -> Policy:
    return Policy(load_model(model_folder), 1.0)


def _sequences() -> Sequences:
    completions = torch.tensor(LENGTHS) - 2
    prompts = torch.full_like(completions, 2)
    return Sequences(torch.zeros(len(LENGTHS), 40, dtype=torch.int64), prompts, completions, torch.arange(len(LENGTHS)))


def _largest_of_each_try(memory: OutOfMemoryRetry, fits: Callable[[int], bool]) -> tuple[list[int], list[int]]:
    """Tokens of the largest pass, and recomputed layers, in each attempt until the largest pass fits."""
    sequences, tokens, layers = _sequences(), [], []

    def work(parts: list[Tensor]) -> None:
        assert sorted(torch.cat(parts).tolist()) == list(range(len(LENGTHS)))
        tokens.append(max(int(sequences.lengths[part].sum()) for part in parts))
        layers.append(memory.policy.recomputed)
        if not fits(tokens[-1]):
            raise torch.OutOfMemoryError("CUDA out of memory")

    memory.run(sequences, work, share_prompts=True)
    return tokens, layers


def test_a_budget_beyond_what_there_is_costs_no_attempt(policy: Policy) -> None:
    memory = OutOfMemoryRetry(1000, policy)
    tokens, _ = _largest_of_each_try(memory, lambda tokens: tokens <= 50)
    assert tokens == [100, 50]
    assert (memory.tokens, memory.ran_out) == (50, True)


def test_no_pass_is_cut_below_the_longest_sequence_and_then_layers_are_recomputed(policy: Policy) -> None:
    memory = OutOfMemoryRetry(1000, policy)
    tokens, layers = _largest_of_each_try(memory, lambda _: policy.recomputed == 2)
    assert tokens == [100, 50, 40, 40, 40]
    assert layers == [0, 0, 0, 1, 2]
    assert memory.tokens == 40


def test_without_a_gradient_nothing_is_recomputed_and_the_longest_sequence_is_named(policy: Policy) -> None:
    memory = OutOfMemoryRetry(100, policy)
    with torch.no_grad(), pytest.raises(TrainingError, match=r"single completion \(40 tokens with its prompt\)"):
        _largest_of_each_try(memory, lambda _: False)
    assert policy.recomputed == 0


def test_a_training_that_had_memory_for_all_says_so(policy: Policy) -> None:
    memory = OutOfMemoryRetry(60, policy)
    assert _largest_of_each_try(memory, lambda _: True)[0] == [60]
    assert (memory.tokens, memory.ran_out) == (60, False)
