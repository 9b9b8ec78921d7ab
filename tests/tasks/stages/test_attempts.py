"""A flow run that is stopped from outside goes on by itself; a cancelled one, or one that gets nowhere, does not."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import pytest
from prefect.client.schemas.objects import FlowRun, State, TaskRun
from prefect.states import AwaitingRetry, Cancelling, Crashed, Failed, Pending, Running, Scheduled, Suspended

from tasks.stages import attempts
from tasks.stages.attempts import MOST_STOPS, RETURN_SECONDS, schedule_again

WHAT = "train was interrupted, 3 of 6 updates saved"
Asked = Callable[..., tuple[str, list[State]]]


class Server:
    """Stands for Prefect's: the states that the flow run was in, and those that it is put into."""

    def __init__(self, states: list[State]):
        self.states, self.proposed = states, []

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def read_flow_run_states(self, run_id: uuid.UUID) -> list[State]:
        return self.states[::-1]

    def set_flow_run_state(self, run_id: uuid.UUID, state: State) -> None:
        self.proposed.append(state)


def _attempt(stopped: str) -> list[State]:
    return [Pending(), Running(), AwaitingRetry(message=stopped)]


def _stops(count: int, what: str = WHAT) -> list[State]:
    return [state for _ in range(count) for state in _attempt(what)]


@pytest.fixture
def comes_back(monkeypatch: pytest.MonkeyPatch) -> Asked:
    def asked(*states: State) -> tuple[str, list[State]]:
        server = Server(list(states))
        monkeypatch.setattr(attempts, "get_client", lambda sync_client: server)
        monkeypatch.setenv("PREFECT__RUNTIME__FLOW_RUN__ID", str(uuid.uuid4()))
        return schedule_again(WHAT), server.proposed

    return asked


@pytest.mark.parametrize(
    "before",
    [
        [],
        _stops(MOST_STOPS - 1),
        [*_stops(MOST_STOPS - 1), *_attempt("train was interrupted, 2 of 6 updates saved")],
        [*_stops(MOST_STOPS), *_attempt("")],  # a person's Retry begins from the start
    ],
)
def test_a_run_that_is_stopped_from_outside_is_scheduled_for_when_its_process_has_gone(
    before: list[State], comes_back: Asked
) -> None:
    back, proposed = comes_back(*before, Pending(), Running())
    assert back
    [state] = proposed
    assert (state.type.value, state.name, state.message) == ("SCHEDULED", "AwaitingRetry", WHAT)
    due = state.state_details.scheduled_time
    assert due is not None and (due - state.timestamp).total_seconds() == pytest.approx(RETURN_SECONDS, abs=5)


@pytest.mark.parametrize(
    "before", [[Running(), Cancelling()], [Running(), Crashed()], [*_stops(MOST_STOPS), Running()]]
)
def test_a_run_that_is_cancelled_or_over_or_gets_nowhere_stays_ended(before: list[State], comes_back: Asked) -> None:
    assert comes_back(*before) == ("", [])


@pytest.mark.parametrize(
    ("state", "goes_on"), [(Scheduled, "by itself"), (lambda: Suspended(timeout_seconds=60), "Resume")]
)
def test_a_run_that_is_scheduled_already_or_suspended_stays_as_it_is(
    state: Callable[[], State], goes_on: str, comes_back: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[str] = []
    monkeypatch.setattr(attempts, "emit_event", lambda event, resource, related: sent.append(event))
    back, proposed = comes_back(Running(), state())
    assert goes_on in back and not proposed
    assert sent == ["prefect.flow-run.Suspended"] * (goes_on == "Resume")


@pytest.mark.parametrize(
    ("before", "restored"),
    [
        ([Running, lambda: AwaitingRetry(message=WHAT), Crashed], [WHAT]),  # the crash watch, or the process's exit
        ([Running, Failed, lambda: AwaitingRetry(message="by a person"), Crashed], ["by a person"]),
        ([lambda: AwaitingRetry(message=WHAT), Pending, Running, Crashed], []),
    ],
)
def test_a_retry_that_was_waiting_when_its_run_was_called_crashed_is_scheduled_again(
    before: list[Callable[[], State]], restored: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server([state() for state in before])
    monkeypatch.setattr(attempts, "get_client", lambda sync_client: server)
    attempts.restore_lost_retry(None, FlowRun(flow_id=uuid.uuid4()), None)
    assert [(state.name, state.message) for state in server.proposed] == [("AwaitingRetry", it) for it in restored]


@pytest.mark.parametrize(("attempt", "closed"), [(1, 0), (2, 1)])
def test_a_second_attempt_closes_what_the_first_left_open(
    attempt: int, closed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, asked, left_open = Server([]), list[Any](), TaskRun(flow_run_id=uuid.uuid4(), task_key="", dynamic_key="0")
    found: dict[Any, Any] = {}
    server.read_task_runs = lambda task_run_filter: asked.append(task_run_filter) or [left_open]
    server.set_task_run_state = lambda run_id, state, force: found.update({run_id: (state.name, force)})
    monkeypatch.setattr(attempts, "get_client", lambda sync_client: server)
    monkeypatch.setenv("PREFECT__RUNTIME__FLOW_RUN__ID", str(left_open.flow_run_id))
    monkeypatch.setenv("PREFECT__RUNTIME__FLOW_RUN__RUN_COUNT", str(attempt))
    attempts.crash_task_runs_left_open()
    assert found == dict([(left_open.id, ("Crashed", True))] * closed)
    wanted = {"flow_run_id": {"any_": [left_open.flow_run_id]}, "state": {"type": {"any_": ["RUNNING", "PENDING"]}}}
    assert [each.model_dump(exclude_none=True, exclude_defaults=True) for each in asked] == [wanted] * closed
