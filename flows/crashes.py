"""A flow run whose process and runner are both gone: nobody reports its end, so the server's own watch does."""

from __future__ import annotations

from datetime import timedelta

from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import StateType
from prefect.events import AutomationCore, EventTrigger, Posture
from prefect.events.actions import ChangeFlowRunState

from flows.environment import HEARTBEAT_SECONDS

NAME = "grpo: runs whose process is gone are crashed"
SILENCE = timedelta(seconds=2.5 * HEARTBEAT_SECONDS)  # two missed
ENDED = [f"prefect.flow-run.{state}" for state in ("Completed", "Failed", "Cancelled", "Crashed")]


def ensure_crash_automation() -> None:
    """Have the server mark a flow run as crashed when its heartbeat stops; once, however often it is called.

    Flow runs send heartbeats where `environment.configure` was called, or PREFECT_FLOWS_HEARTBEAT_FREQUENCY set.
    """
    heartbeat = "prefect.flow-run.heartbeat"
    trigger = EventTrigger(
        after={heartbeat},
        expect={heartbeat, *ENDED},
        match={"prefect.resource.id": ["prefect.flow-run.*"]},
        for_each={"prefect.resource.id"},
        posture=Posture.Proactive,
        threshold=1,
        within=SILENCE,
    )
    action = ChangeFlowRunState(state=StateType.CRASHED, message="its process sends no heartbeat any more")
    with get_client(sync_client=True) as client:
        if not client.read_automations_by_name(NAME):
            client.create_automation(AutomationCore(name=NAME, trigger=trigger, actions=[action]))
