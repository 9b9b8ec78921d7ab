"""Sets up what the flows need on a Prefect server. Limits and automations that exist stay as they are.

The crash watch reports the end of a flow run whose process and runner have both died; nothing else would.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate
from prefect.client.schemas.filters import FlowRunFilter
from prefect.client.schemas.objects import StateType
from prefect.client.schemas.sorting import FlowRunSort
from prefect.events import AutomationCore, EventTrigger, Posture
from prefect.events.actions import ChangeFlowRunState
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound

from flows.serving.environment import HEARTBEAT_SECONDS, TAG
from flows.serving.up_file import ServerError
from grpo_core.planning.nvidia import visible_devices
from tasks.processes.gpus.slots import GPU_LIMIT
from tasks.stages.attempts import restore_lost_retry
from tasks.stages.prefect_address import HTTP_ERROR, describe_server_failure

CRASH_WATCH = "grpo: runs whose process is gone are crashed"
NO_HEARTBEATS = "its process no longer sends heartbeats"  # message of the state
MOST_RESTORED = 100  # runs
LONGEST_SILENCE = timedelta(seconds=2.5 * HEARTBEAT_SECONDS)  # two heartbeats missed
# Events after which an attempt sends no heartbeats: its end, its wait for a person, or the request for the next one.
# Each may arrive before the attempt's last heartbeat.
ENDED = [
    f"prefect.flow-run.{state}"
    for state in ("Completed", "Failed", "Cancelled", "Crashed", "AwaitingRetry", "Suspended")
]


@contextmanager
def prefect_answering() -> Iterator[None]:
    """Raises ServerError if the server does not answer a request of the body, fails, or asks for a password."""
    try:
        yield
    except HTTP_ERROR as error:
        if sentence := describe_server_failure(error):
            raise ServerError(sentence) from error
        raise


def check_access() -> None:
    """Raises ServerError if the server does not answer, or asks for a password, and none or a wrong one is set."""
    with prefect_answering(), get_client(sync_client=True) as client:
        client.api_version()


def set_up() -> None:
    """Create the GPU limit and the crash watch, and restore the retries that the watch has taken for crashes."""
    ensure_gpu_limit()
    ensure_crash_watch()
    restore_lost_retries()


def ensure_gpu_limit() -> None:
    """Create the limit by which trainings and evaluations share GPUs, with one slot per GPU of this machine and at
    least one. If the server has a limit of that name, it is kept as it is."""
    with get_client(sync_client=True) as client:
        try:
            client.read_global_concurrency_limit_by_name(GPU_LIMIT)
        except ObjectNotFound:
            slots = max(1, len(visible_devices()))
            with suppress(ObjectAlreadyExists):  # made by another command, or a request whose answer is lost
                client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(name=GPU_LIMIT, limit=slots))


def restore_lost_retries() -> None:
    """Schedule again the last of our flow runs that waited for their next attempt when the watch called them crashed.
    A server that other programs started does not renew the watch as it starts."""
    crashed = FlowRunFilter.model_validate({"tags": {"all_": [TAG]}, "state": {"name": {"any_": ["Crashed"]}}})
    with get_client(sync_client=True) as client:
        newest = FlowRunSort.END_TIME_DESC
        for run in client.read_flow_runs(flow_run_filter=crashed, sort=newest, limit=MOST_RESTORED):
            if run.state and run.state.message == NO_HEARTBEATS:
                restore_lost_retry(None, run, run.state)


def ensure_crash_watch() -> None:
    """Make the server mark one of our flow runs as crashed if its heartbeat stops.

    Flow runs send heartbeats if `environment.configure` was called, or PREFECT_FLOWS_HEARTBEAT_FREQUENCY is set.
    """
    heartbeat = "prefect.flow-run.heartbeat"
    trigger = EventTrigger(
        after={heartbeat},
        expect={heartbeat, *ENDED},
        match={"prefect.resource.id": ["prefect.flow-run.*"]},
        match_related={"prefect.resource.role": "tag", "prefect.resource.id": f"prefect.tag.{TAG}"},
        for_each={"prefect.resource.id"},
        posture=Posture.Proactive,
        threshold=1,
        within=LONGEST_SILENCE,
    )
    action = ChangeFlowRunState(state=StateType.CRASHED, message=NO_HEARTBEATS)
    with get_client(sync_client=True) as client:
        if not client.read_automations_by_name(CRASH_WATCH):
            client.create_automation(AutomationCore(name=CRASH_WATCH, trigger=trigger, actions=[action]))
