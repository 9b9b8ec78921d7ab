"""Metrics say which process works longest, and how fast each machine samples."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from grpo_core.rollout.batch_metrics import PHASES, work_metrics


def test_the_process_that_works_longest_is_compared_with_the_median_of_the_others() -> None:
    work = [{"sampling": seconds, "tokens": 60.0, "rewards": 1.0} for seconds in (2.0, 3.0, 9.0, 4.0)]
    assert work_metrics(work, per_machine=2) == {
        "time/sampling/slowest_rank": 2,
        "time/sampling/lost": 6.0,
        "time/rewards/slowest_rank": 0,
        "time/rewards/lost": 0.0,
        "time/update/slowest_rank": 0,
        "time/update/lost": 0.0,
        "time/machine_0/tokens_per_second": 40.0,
        "time/machine_1/tokens_per_second": 120 / 9,
    }


def test_machines_are_told_apart_only_if_there_are_several() -> None:
    assert not [name for name in work_metrics([{"sampling": 1.0}] * 2, per_machine=2) if "machine" in name]


def test_a_single_process_and_processes_that_record_nothing_have_no_such_metrics() -> None:
    assert work_metrics([{"sampling": 1.0}], 1) == work_metrics([{"tokens": 1.0}] * 2, 1) == {}


@given(st.lists(st.floats(0.1, 10), min_size=2, max_size=8))
def test_no_process_loses_less_than_nothing(seconds: list[float]) -> None:
    metrics = work_metrics([dict.fromkeys(PHASES, each) for each in seconds], 1)
    assert all(metrics[f"time/{phase}/lost"] >= 0 for phase in PHASES)
