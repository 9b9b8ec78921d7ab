"""Cleans up between two attempts of a flow run: task runs that a killed attempt left open, retries that Prefect loses,
and runs that a machine had to give up."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, TaskRunFilter
from prefect.client.schemas.objects import TERMINAL_STATES, FlowRun, StateType
from prefect.events import emit_event
from prefect.runtime import flow_run
from prefect.states import AwaitingRetry, Crashed

# Time until the interrupted process has ended, and its runner if that was told to end too: a runner that starts the
# next attempt while it still watches this one loses track of it. Runners take 28 s to end and look 10 s ahead.
RETURN_SECONDS = 40
MOST_STOPS = 5  # at the same point of a run
RUNS_PER_REQUEST = 200  # Prefect's maximum


def crash_task_runs_left_open() -> None:
    """Mark task runs that an earlier attempt of this flow run left running as crashed. Call this when a flow begins."""
    if (flow_run.run_count or 0) < 2:
        return
    states = {"type": {"any_": [StateType.RUNNING, StateType.PENDING]}, "name": None}
    running = TaskRunFilter.model_validate({"flow_run_id": {"any_": [flow_run.id]}, "state": states})
    with get_client(sync_client=True) as client:
        for left_open in client.read_task_runs(task_run_filter=running):
            client.set_task_run_state(left_open.id, Crashed(message="the process that ran it was killed"), force=True)


def restore_lost_retry(flow: Any, flow_run: FlowRun, state: Any) -> None:
    """Hook for `on_crashed`: schedule again a retry that was lost. A run that waits for its next attempt has no process
    that could crash.

    Prefect shows a run as failed before its process has ended, and then reports the process's exit status as a crash,
    even if a retry was asked for in between. The crash watch may miss that a run was interrupted, if Prefect's server
    ends at the same time.
    """
    with get_client(sync_client=True) as client:
        states = sorted(client.read_flow_run_states(flow_run.id), key=lambda known: known.timestamp)
        if [known.name for known in states[-2:]] == ["AwaitingRetry", "Crashed"]:
            client.set_flow_run_state(flow_run.id, AwaitingRetry(message=states[-2].message))


def names_going_on() -> set[str]:
    """Names of the runs and sweeps of which a flow run has begun and not ended: it is at work, waits for its next
    attempt, or is suspended."""
    going_on = {"type": {"not_any_": [*TERMINAL_STATES]}}
    begun = FlowRunFilter.model_validate({"start_time": {"is_null_": False}, "state": going_on})
    found = list[FlowRun]()
    with get_client(sync_client=True) as client:
        while more := client.read_flow_runs(flow_run_filter=begun, limit=RUNS_PER_REQUEST, offset=len(found)):
            found += more
    return {str(run.parameters.get("run", run.name)) for run in found}  # a stage's flow run names its run


def repeat_suspension() -> None:
    """Send the event of this flow run's suspension again. Call this when its process is about to end: after a
    heartbeat that the process sent while it saved its state, the crash watch would wait for another one, and call the
    suspended run crashed."""
    tags = [{"prefect.resource.id": f"prefect.tag.{tag}", "prefect.resource.role": "tag"} for tag in flow_run.tags]
    emit_event("prefect.flow-run.Suspended", {"prefect.resource.id": f"prefect.flow-run.{flow_run.id}"}, related=tags)


def schedule_again(what: str) -> str:
    """Schedule this flow run again after a signal that was not a cancellation, for example because the machine is
    needed for something else; a suspended run stays so until a person resumes it. `what`: what was interrupted, and
    what is saved.

    Returns when it goes on. Returns "", and leaves the run's state as it is, if the run was cancelled, or if it has
    been stopped MOST_STOPS times with nothing saved in between.
    """
    with get_client(sync_client=True) as client:
        states = sorted(client.read_flow_run_states(flow_run.id), key=lambda known: known.timestamp)
        stops = [known.message for known in states if known.name == "AwaitingRetry"][-MOST_STOPS:]
        if states[-1].is_cancelling() or states[-1].is_final() or stops == [what] * MOST_STOPS:
            return ""
        if states[-1].is_paused():
            repeat_suspension()
            return "Resume goes on with it"
        # Prefect's own response to SIGTERM in a container may have scheduled it already.
        if not states[-1].is_scheduled():
            later = datetime.now(UTC) + timedelta(seconds=RETURN_SECONDS)
            client.set_flow_run_state(flow_run.id, AwaitingRetry(scheduled_time=later, message=what))
    return "it goes on by itself, on this machine or another"
