"""Task runs of an attempt that was killed: nobody says that they ended, so the next attempt of the flow run does."""

from __future__ import annotations

from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import TaskRunFilter, TaskRunFilterFlowRunId, TaskRunFilterState
from prefect.client.schemas.objects import StateType
from prefect.runtime import flow_run
from prefect.states import Crashed


def close_left_open() -> None:
    """Mark the task runs as crashed that an earlier attempt of this flow run left running. Called as a flow begins."""
    if (flow_run.run_count or 0) < 2:
        return
    running = TaskRunFilter(
        flow_run_id=TaskRunFilterFlowRunId(any_=[flow_run.id]),
        state=TaskRunFilterState(type={"any_": [StateType.RUNNING, StateType.PENDING]}),
    )
    with get_client(sync_client=True) as client:
        for left_open in client.read_task_runs(task_run_filter=running):
            client.set_task_run_state(left_open.id, Crashed(message="the process that ran it was killed"), force=True)
