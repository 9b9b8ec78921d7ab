"""What both sides say of the probe batch tells an engine that has the policy's weights from one that has others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.lost_weights import LEARNING_RATES, measure
from grpo_core.training.probe import Probe, Scores, probe_sequences

TOKENS = 100
ROUNDING = 0.005


def _rounding(generator: torch.Generator, copies: int = 1) -> Tensor:
    """What rounding adds to the log-probabilities of one copy of the weights, drawn again after each hand-over."""
    return ROUNDING * torch.randn(copies, TOKENS, generator=generator)


def _stop(
    engine: Callable[[Tensor, int, Tensor], Tensor], step: float, updates: int = 60, copies: int = 1, growth: float = 1
) -> tuple[int | None, int | None]:
    """The first updates after which a copy counts as unchanged, and as lagging; None: not at all.

    The policy moves by `step` per update. `engine`: the (C, N) scores, given the policy's at each hand-over so far
    (k + 1, N), their number k, and fresh rounding. `growth`: of both sides' rounding from the first update to the last.
    """
    generator = torch.Generator().manual_seed(0)
    direction = torch.randn(TOKENS, generator=generator)
    policy = torch.empty(0, TOKENS)
    probe, unchanged, lagging = Probe([], "bf16"), None, None
    for number in range(updates + 1):
        noise = direction + 0.5 * torch.randn(TOKENS, generator=generator)
        policy = torch.cat([policy, (policy[-1:] if number else torch.zeros(1, TOKENS)) + (number > 0) * step * noise])
        scale = growth ** (number / updates)
        trainer = policy[-1] + scale * _rounding(generator)[0]
        moved, lag = probe.compare(Scores(trainer, engine(policy, number, scale * _rounding(generator, copies))))
        unchanged = number if moved and unchanged is None else unchanged
        lagging = number if lag > 1 and lagging is None else lagging
    return unchanged, lagging


@pytest.mark.parametrize("step", [0.0, 1e-5, 1e-4, 1e-3, 1e-2, 0.3])
@pytest.mark.parametrize("growth", [0.5, 1, 2])
def test_an_engine_that_differs_by_rounding_alone_is_never_blamed(step: float, growth: float) -> None:
    assert _stop(lambda policy, k, noise: policy[k] + noise, step, copies=3, growth=growth) == (None, None)


@pytest.mark.parametrize("step", [1e-4, 1e-3, 1e-2])
@pytest.mark.parametrize("last", [0, 20])
def test_an_engine_that_stays_bit_for_bit_the_same_is_found_in_the_first_update(step: float, last: int) -> None:
    kept: dict[int, Tensor] = {}

    def stale(policy: Tensor, k: int, noise: Tensor) -> Tensor:
        kept[k] = policy[k] + noise
        return kept[min(k, last)]

    assert _stop(stale, step)[0] == last + 1


@pytest.mark.parametrize("last", [0, 20])
def test_a_stale_engine_that_rounds_differently_each_time_is_found_when_the_policy_has_left_the_rounding(
    last: int,
) -> None:
    """The policy moves by 0.0009 per update, the sides differ by 0.0056: four times as much is 25 updates."""
    unchanged, lagging = _stop(lambda policy, k, noise: policy[min(k, last)] + noise, 1e-3)
    assert unchanged is None
    assert lagging is not None
    assert last + 20 < lagging <= last + 35


def test_one_stale_copy_of_several_is_found() -> None:
    def engine(policy: Tensor, k: int, noise: Tensor) -> Tensor:
        return torch.stack([policy[k], policy[0], policy[k]]) + noise

    _, lagging = _stop(engine, 1e-3, copies=3)
    assert lagging is not None


def test_an_engine_that_gets_only_half_of_the_weights_is_found() -> None:
    """Half of the tokens' log-probabilities move with weights that do not arrive."""

    def engine(policy: Tensor, k: int, noise: Tensor) -> Tensor:
        return torch.cat([policy[k, : TOKENS // 2], policy[0, TOKENS // 2 :]]) + noise

    _, lagging = _stop(engine, 1e-3)
    assert lagging is not None


def test_changes_too_small_to_tell_anything_add_up() -> None:
    """A tenth of the rounding is 0.001: 96 times 1.05e-5."""
    probe, trainer, engine = Probe([], "bf16"), torch.zeros(TOKENS), torch.full((1, TOKENS), 0.01)
    found = [probe.compare(Scores(trainer + number * 1.05e-5, engine))[0] for number in range(100)]
    assert [number for number, moved in enumerate(found) if moved] == [96]


def test_a_policy_that_does_not_move_says_nothing_about_its_engine() -> None:
    probe, scores = Probe([], "no"), Scores(torch.zeros(TOKENS), torch.full((1, TOKENS), 1e-7))
    assert [probe.compare(scores) for _ in range(3)] == [(0.0, 0.0)] * 3


def test_the_probe_is_fixed_short_and_has_a_score_for_a_prompt_of_one_token() -> None:
    prompts = [[n] * (1 + 40 * n) for n in range(20)]
    sequences = probe_sequences(prompts, 99, longest=64)
    assert sequences == probe_sequences(prompts, 99, longest=64)
    assert len(sequences) == 16
    assert sequences[0] == [0, 99]
    assert all(2 <= len(ids) <= 16 and ids[-1] == 99 for ids in sequences)
    assert all(len(ids) == 2 for ids in probe_sequences(prompts, 99, longest=2))


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_training_notices_a_hand_over_that_does_nothing_in_the_first_update(tmp_path: Path, precision: str) -> None:
    """Whatever the learning rate; a hand-over as it should be is not blamed."""
    rows = measure("copy", precision, tmp_path, updates=5)
    assert [row.learning_rate for row in rows] == list(LEARNING_RATES)
    assert [row.stopped for row in rows] == [None] * 4
    assert [row.stopped_lost for row in rows] == [1] * 4


def test_the_probe_of_a_tokenizer_without_an_end_token_is_of_the_prompts_tokens() -> None:
    assert probe_sequences([[7], [4, 5, 6]], None, longest=3) == [[7, 7], [5, 6, 4]]
