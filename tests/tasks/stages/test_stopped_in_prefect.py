"""Which flow runs must stop though nothing sends their process a signal."""

from __future__ import annotations

import pytest
from prefect.client.schemas.objects import State
from prefect.states import AwaitingRetry, Cancelled, Cancelling, Crashed, Paused, Running, Suspended

from tasks.stages.stopped_in_prefect import is_stopped


def _asking() -> State:
    state = Suspended(timeout_seconds=60)
    state.state_details.run_input_keyset = {"response": "suspended-approve-1-response"}
    return state


@pytest.mark.parametrize(
    ("states", "deployed", "alone"),
    [
        ([Running()], False, False),
        ([Running(), Suspended(timeout_seconds=60)], True, True),
        ([Running(), Paused(timeout_seconds=60)], True, True),
        ([Running(), _asking()], False, False),
        ([Running(), Suspended(timeout_seconds=60), Cancelled()], True, True),
        ([Running(), Cancelling()], False, True),
        ([Running(), Cancelling(), Cancelled()], False, True),
        ([Running(), AwaitingRetry()], False, False),
        ([Running(), Crashed()], False, False),
    ],
)
def test_a_run_stops_if_it_is_suspended_or_cancelled_and_no_runner_says_so(
    states: list[State], deployed: bool, alone: bool
) -> None:
    assert (is_stopped(states, of_deployment=True), is_stopped(states, of_deployment=False)) == (deployed, alone)
