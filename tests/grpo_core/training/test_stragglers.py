"""A straggler is named once when it becomes one, and once when it is none any more."""

from __future__ import annotations

import itertools

import pytest

from grpo_core.system.progress import MACHINES
from grpo_core.training.log import LAG_BATCHES, Stragglers

numbers = itertools.count()


def _said(stragglers: Stragglers, rank: int, lost: float, times: int, phase: str = "sampling") -> list[str]:
    said = []
    for _ in range(times):
        figures = {f"time/{phase}/slowest_rank": rank, f"time/{phase}/lost": lost + 1e-9 * next(numbers)}
        said += stragglers.note({**figures, "step_time": 10.0})
    return said


def test_a_straggler_is_named_when_it_becomes_one_and_when_it_is_none_any_more() -> None:
    stragglers = Stragglers()
    assert _said(stragglers, 3, 2.0, LAG_BATCHES - 1) == []
    [named] = _said(stragglers, 3, 2.0, 1)
    assert named.startswith("straggler: rank 3 is slower than the others in sampling, 5 times in a row")
    assert "they wait 2 s of 10 s for it" in named
    assert _said(stragglers, 3, 2.0, 50) == []
    assert _said(stragglers, 3, 0.1, LAG_BATCHES - 1) == []
    [over] = _said(stragglers, 1, 0.1, 1)
    assert over == "straggler: rank 3 is no longer slower than the others in sampling"
    assert _said(stragglers, 1, 0.1, 50) == []


def test_whichever_process_is_slowest_in_turn_is_no_straggler() -> None:
    stragglers = Stragglers()
    assert [line for rank in range(40) for line in _said(stragglers, rank % 2, 5.0, 1)] == []


def test_phases_are_told_apart_and_a_machine_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MACHINES, '["a", "b"]')
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    stragglers = Stragglers()
    assert _said(stragglers, 5, 2.0, LAG_BATCHES - 1, "rewards") == _said(stragglers, 5, 2.0, LAG_BATCHES - 1) == []
    assert "rank 5 (b) is slower than the others in rewards" in _said(stragglers, 5, 2.0, 1, "rewards")[0]


def test_updates_that_read_the_same_generation_batch_count_once() -> None:
    stragglers = Stragglers()
    figures = {"time/update/slowest_rank": 1.0, "time/update/lost": 5.0, "step_time": 10.0}
    assert [line for _ in range(20) for line in stragglers.note(figures)] == []


def test_metrics_of_a_single_process_say_nothing() -> None:
    assert Stragglers().note({"step_time": 1.0}) == []
