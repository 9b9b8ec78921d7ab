"""Stops a flow's process as SIGTERM does if its flow run is stopped in Prefect and nothing sends that signal. Prefect
looks at a suspended run only where a task begins or ends, and tells no process of a run without a deployment."""

from __future__ import annotations

import contextvars
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from uuid import UUID

from prefect import get_run_logger
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State
from prefect.runtime import deployment, flow_run

POLL_SECONDS = 5.0


@contextmanager
def stopping_with_run() -> Iterator[None]:
    """While the body of a flow runs, send SIGTERM to this process once the flow run is stopped as `is_stopped` says."""
    if flow_run.id is None:
        yield
        return
    over, context = threading.Event(), contextvars.copy_context()
    arguments = (UUID(flow_run.id), bool(deployment.id), over)
    threading.Thread(target=context.run, args=(_watch, *arguments), daemon=True).start()
    try:
        yield
    finally:
        over.set()


def is_stopped(states: Sequence[State], of_deployment: bool) -> bool:
    """True if a flow run with this history must stop and no signal says so.

    A deployment's runner sends one after Cancelling. A run that waits for a person's answer has suspended itself.
    """
    last, before = states[-1], states[-2:-1]
    if last.is_paused():
        return last.state_details.run_input_keyset is None
    if of_deployment:
        return last.is_cancelled() and not any(state.is_cancelling() for state in before)
    return last.is_cancelled() or last.is_cancelling()


def _watch(run_id: UUID, of_deployment: bool, over: threading.Event) -> None:
    with get_client(sync_client=True) as client:
        while not over.wait(POLL_SECONDS):
            try:
                states = sorted(client.read_flow_run_states(run_id), key=lambda state: state.timestamp)
            except Exception as error:  # the server may be away
                get_run_logger().debug("the state of the flow run cannot be read: %r", error)
                continue
            if is_stopped(states, of_deployment) and not over.is_set():
                get_run_logger().info("%s in Prefect: what runs is told to stop", states[-1].name)
                os.kill(os.getpid(), signal.SIGTERM)
                return
