"""What both sides say of the probe batch tells an engine that has the policy's weights from one that has others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.lost_weights import measure
from grpo_core.rollout.types import Completion, Finished, Request, Sampling
from grpo_core.training.sync_probe import Probe, Scores, probe_batch

TOKENS = 100
RATES = (1e-7, 1e-6, 1e-5, 1e-4)
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
    probe, unchanged, lagging = Probe([], [], "bf16"), None, None
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


@pytest.mark.parametrize("stale", [1, 2, 3])
def test_copies_that_leave_and_come_back_are_compared_with_those_of_before(stale: int) -> None:
    """The last copy of hand-over `stale` has the weights of the first."""
    probe, draw = Probe([], [], "no"), torch.Generator().manual_seed(0)
    trainer = first = torch.randn(TOKENS, generator=draw)
    for number, copies in enumerate((3, 1, 2, 3)[: stale + 1]):
        engine = trainer + 1e-7 * torch.randn(copies, TOKENS, generator=draw)
        if number == stale:
            engine[-1] = first
        moved, lag = probe.compare(Scores(trainer, engine))
        assert (moved > 0 or lag > 1) == (number == stale)
        trainer = trainer + 0.01 * torch.randn(TOKENS, generator=draw)


def test_an_engine_that_gets_only_half_of_the_weights_is_found() -> None:
    """Half of the tokens' log-probabilities move with weights that do not arrive."""

    def engine(policy: Tensor, k: int, noise: Tensor) -> Tensor:
        return torch.cat([policy[k, : TOKENS // 2], policy[0, TOKENS // 2 :]]) + noise

    _, lagging = _stop(engine, 1e-3)
    assert lagging is not None


def test_a_late_lag_is_found_however_far_the_policy_has_come() -> None:
    """A fiftieth of the way from the base, 0.2, would hide the missing 0.1."""
    probe = Probe([], [], "no")
    places = [(0.0, 0.0), (10.0, 10.0), (10.1, 10.0 + 1e-6)]  # of the policy, and of the engine
    lags = [probe.compare(Scores(torch.full((8,), at), torch.full((1, 8), engine)))[1] for at, engine in places]
    assert [lag > 1 for lag in lags] == [False, False, True]


def test_changes_too_small_to_tell_anything_add_up() -> None:
    """A tenth of the rounding is 0.001: 96 times 1.05e-5."""
    probe, trainer, engine = Probe([], [], "bf16"), torch.zeros(TOKENS), torch.full((1, TOKENS), 0.01)
    found = [probe.compare(Scores(trainer + number * 1.05e-5, engine))[0] for number in range(100)]
    assert [number for number, moved in enumerate(found) if moved] == [96]


def test_a_policy_that_does_not_move_says_nothing_about_its_engine() -> None:
    probe, scores = Probe([], [], "no"), Scores(torch.zeros(TOKENS), torch.full((1, TOKENS), 1e-7))
    assert [probe.compare(scores) for _ in range(3)] == [(0.0, 0.0)] * 3


class Echo:
    """Answers, last request first, with the first token of each prompt as often as it may."""

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[list[Finished]]:
        assert sampling.temperature == 0
        for number, request in reversed([*enumerate(requests)]):
            assert request.num_completions == 1
            yield []
            yield [(number, [Completion(request.prompt_ids[:1] * sampling.max_tokens, [], truncated=True)])]


@pytest.mark.parametrize("longest", [2, 3, 20, 64])
def test_the_probe_is_what_the_engine_says_to_the_ends_of_a_few_prompts(longest: int) -> None:
    engine: Any = Echo()
    prompts = [[*range(n, 1 + 41 * n)] for n in range(20)]
    contexts, said = probe_batch(engine, prompts, longest)
    assert len(contexts) == len(said) == 16
    assert contexts[0] == [0]
    for prompt, context, continuation in zip(prompts, contexts, said, strict=False):
        assert context and context == prompt[-len(context) :]
        assert continuation and set(continuation) == {context[0]}
        assert len(context) <= 16 and len(continuation) <= 16
        assert len(context + continuation) <= longest


@pytest.mark.parametrize(
    ("precision", "own_bound", "first_drift", "bound", "first_bound"),
    [
        ("bf16", None, 0.01, 0.1, 0.3),
        ("bf16", None, 0.2, 0.6, 0.3),
        ("no", None, 1e-7, 1e-4, 0.03),
        ("no", None, 2e-3, 6e-3, 0.03),
        ("bf16", 0.05, 0.2, 0.05, 0.05),
    ],
)
def test_the_bound_follows_from_what_rounding_does_with_the_bases_weights(
    precision: str, own_bound: float | None, first_drift: float, bound: float, first_bound: float
) -> None:
    probe = Probe([], [], precision, own_bound, first_drift)
    assert (probe.bound, probe.first_bound) == (pytest.approx(bound), first_bound)


def test_tokens_of_which_a_policy_is_certain_hide_no_engine_that_stays_the_same() -> None:
    """Nine of ten log-probabilities are 0 and stay it; the others move by as much as rounding."""
    probe, step = Probe([], [], "bf16"), (torch.arange(TOKENS) % 10 == 0) * ROUNDING
    engine = torch.full((1, TOKENS), ROUNDING)
    found = [probe.compare(Scores(number * step, engine))[0] for number in range(4)]
    assert any(found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "rates", "losses"),
    [
        ("bf16", RATES, ["nothing arrives"]),
        ("no", (1e-6,), ["one MLP stays", "the embedding stays", "lm_head stays", "half the rows of lm_head stay"]),
        pytest.param("no", RATES, ["nothing arrives"], marks=pytest.mark.e2e),
    ],
)
def test_the_probe_alone_notices_in_the_first_update(
    tmp_path: Path, precision: str, rates: Sequence[float], losses: list[str]
) -> None:
    """A hand-over as it should be is not blamed."""
    rows = measure("copy", precision, tmp_path, updates=5, updates_lost=1, learning_rates=rates, losses=losses)
    assert [row.learning_rate for row in rows] == [rate for rate in rates for _ in ("", *losses)]
    for row in rows:
        assert (row.lost, row.noticed, row.by) == ((1, 1, "probe") if row.loss else (None, None, "")), row
