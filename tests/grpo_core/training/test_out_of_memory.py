"""Passes shrink when memory runs out, by what the largest of them held."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import PartialState
from torch import Tensor

from grpo_core.errors import TrainingError
from grpo_core.model.loading import load_model
from grpo_core.model.policy import Policy
from grpo_core.model.sequences import Sequences
from grpo_core.training.out_of_memory import OutOfMemoryRetry
from grpo_core.training.update import _Tally
from tests.grpo_core.training.several import in_two_processes

LENGTHS = [10, 40, 10, 10, 20, 10]  # with prompts of 2 tokens


@pytest.fixture
def policy(smooth_model_folder: Path) -> Policy:
    return Policy(load_model(smooth_model_folder), 1.0)


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


def test_a_budget_beyond_what_there_is_costs_no_attempt(policy: Policy, capsys: pytest.CaptureFixture[str]) -> None:
    memory = OutOfMemoryRetry(1000, policy)
    tokens, _ = _largest_of_each_try(memory, lambda tokens: tokens <= 50)
    assert tokens == [100, 50]
    assert (memory.tokens, memory.reduced) == (50, 50)
    [said] = capsys.readouterr().out.splitlines()
    assert said.startswith("out of memory: going on with 50 tokens in a forward pass; with train.max_tokens_per_pass =")
    assert said.endswith("= 50 from the start, this does not happen")


def test_no_pass_is_cut_below_the_longest_sequence_and_then_layers_are_recomputed(
    policy: Policy, capsys: pytest.CaptureFixture[str]
) -> None:
    memory = OutOfMemoryRetry(1000, policy)
    tokens, layers = _largest_of_each_try(memory, lambda _: policy.recomputed == 2)
    assert tokens == [100, 50, 40, 40, 40]
    assert layers == [0, 0, 0, 1, 2]
    assert memory.tokens == 40
    assert "= 40 and train.gradient_checkpointing = true from the start" in capsys.readouterr().out.splitlines()[-1]


def test_no_number_is_advised_that_a_plan_refuses(policy: Policy, capsys: pytest.CaptureFixture[str]) -> None:
    """This batch's longest sequence has 40 tokens, and another's might have 60."""
    memory = OutOfMemoryRetry(1000, policy, 60)
    _largest_of_each_try(memory, lambda tokens: tokens <= 50)
    [said] = capsys.readouterr().out.splitlines()
    assert said == (
        "out of memory: going on with 50 tokens in a forward pass; a sequence may have 60, so no "
        "train.max_tokens_per_pass saves this memory; train.gradient_checkpointing, model.use_peft or a shorter "
        "rollout.max_completion_length do"
    )


@pytest.mark.parametrize(
    ("longest", "shows", "names_template"), [(0, False, False), (40, False, False), (0, True, True), (39, False, True)]
)
def test_without_a_gradient_nothing_is_recomputed_and_what_is_too_long_is_named(
    policy: Policy, longest: int, shows: bool, names_template: bool
) -> None:
    memory = OutOfMemoryRetry(100, policy, longest, shows=shows)
    said = r"single completion \(40 tokens with its prompt\)"
    with torch.no_grad(), pytest.raises(TrainingError, match=said) as raised:
        _largest_of_each_try(memory, lambda _: False)
    assert policy.recomputed == 0
    assert ("show less in teacher.template" in str(raised.value)) == names_template


def test_a_training_that_had_memory_for_all_says_so(policy: Policy) -> None:
    memory = OutOfMemoryRetry(60, policy)
    assert _largest_of_each_try(memory, lambda _: True)[0] == [60]
    assert (memory.tokens, memory.reduced) == (60, None)


def test_two_processes_read_the_same_figures_and_agree_on_what_fits_in_both(tmp_path: Path) -> None:
    def start(rank: int) -> None:
        PartialState(cpu=True)
        session: Any = SimpleNamespace(
            memory=SimpleNamespace(tokens=[20_000_001, 20_000_003][rank]), accelerator=SimpleNamespace(num_processes=2)
        )
        tally, mask = _Tally(torch.device("cpu")), torch.tensor([1.0, 1.0, 0.0])
        for name, value in {"loss": 1.0 + rank, "tokens": 2.0, "kept_tokens": 1.0, "kept_entropy": 3.0 * rank}.items():
            tally.sums[name] += value
        tally.add("entropy", torch.tensor([1.0, 3.0, 100.0]) * rank, mask)
        tally.highest("ratio/max", torch.tensor([1.0, 2.0 + rank, 100.0]), mask)
        tally.highest("ratio/min", -torch.tensor([0.5, 2.0 + rank, 0.1]), mask)
        tally.highest("nowhere/max", mask, torch.zeros(3))
        assert tally.read(session, torch.tensor(5.0)) == {
            "loss": 1.5,
            "entropy": 1.0,
            "kept_entropy": 1.5,
            "ratio/max": 3.0,
            "ratio/min": 0.5,
            "grad_norm": 5.0,
        }
        assert session.memory.tokens == 20_000_001

    in_two_processes(tmp_path, start)
