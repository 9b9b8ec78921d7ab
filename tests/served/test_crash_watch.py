"""The crash watch of a real server, and a flow run that was suspended while its process sent heartbeats."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from flows.serving.environment import TAG
from flows.serving.server_setup import LONGEST_SILENCE
from tests.serving import Served

pytestmark = pytest.mark.e2e

LEFT = timedelta(seconds=35)  # until the watch misses the next heartbeat


def _suspended_with_a_heartbeat_after(served: Served) -> str:
    """Id of a flow run as its process leaves it that saved its state after Suspend."""
    flow = served.get("/deployments/name/pipeline/local")["flow_id"]
    run = served.api.post("/flow_runs/", json={"flow_id": flow, "tags": [TAG]}).raise_for_status().json()["id"]
    for state in ("RUNNING", "PAUSED"):
        name = "Suspended" if state == "PAUSED" else "Running"
        forced = {"state": {"type": state, "name": name}, "force": True}
        served.api.post(f"/flow_runs/{run}/set_state", json=forced).raise_for_status()
    heartbeat = {
        "id": str(uuid.uuid4()),
        "occurred": (datetime.now(UTC) - LONGEST_SILENCE + LEFT).isoformat(),
        "event": "prefect.flow-run.heartbeat",
        "resource": {"prefect.resource.id": f"prefect.flow-run.{run}"},
        "related": [{"prefect.resource.id": f"prefect.tag.{TAG}", "prefect.resource.role": "tag"}],
    }
    served.api.post("/events", json=[heartbeat]).raise_for_status()
    return run


def test_a_run_whose_process_sent_heartbeats_after_it_was_suspended_stays_suspended(
    served: Served, storage: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tasks.stages.attempts import repeat_suspension

    ended, killed = (_suspended_with_a_heartbeat_after(served) for _ in range(2))
    monkeypatch.setenv("PREFECT__FLOW_RUN_ID", ended)
    repeat_suspension()
    served.wait(killed, "CRASHED")
    assert served.get(f"/flow_runs/{ended}")["state_name"] == "Suspended"
