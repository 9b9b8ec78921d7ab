"""A flow run that waits for a person, over a real server: suspended, resumed with an answer, ended with it."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from flows.serving.server_setup import CRASH_WATCH
from tests.serving import START_SECONDS, Served

SUSPENDED = "prefect.flow-run.Suspended"
PROJECT = Path(__file__).parents[2]
REGISTER = """
import sys
from tests.evaluations import fixed_samples, promotion_config, register_version
wrong = '<b>no</b> | [link](http://x) \\n# head'
samples = fixed_samples({"base": [0] * 20, "trained": [1] * 15 + [0] * 5})
samples = samples.with_columns(prompt=samples["prompt"] + wrong)
register_version(sys.argv[1], samples, config=promotion_config(approval=True))
"""

pytestmark = pytest.mark.e2e


def _waiting(served: Served, model: str) -> tuple[str, str]:
    """Id of a promotion that is suspended, and what the person is shown."""
    command = [sys.executable, "-c", REGISTER, model]
    subprocess.run(command, cwd=PROJECT, env={**served.environment, "PYTHONPATH": str(PROJECT)}, check=True)
    run_id = served.trigger("promote/local", model=model)
    waiting = served.wait(run_id, "PAUSED")
    assert waiting["state_name"] == "Suspended"
    [watch] = [it for it in served.filter("automations") if it["name"] == CRASH_WATCH]
    assert served.events(SUSPENDED) and SUSPENDED in watch["trigger"]["expect"], "a run that waits is not crashed"
    keys = waiting["state"]["state_details"]["run_input_keyset"]
    return run_id, _shown(served, f"/flow_runs/{run_id}/input/{keys['description']}")


def _shown(served: Served, path: str) -> str:
    """What the person reads: Prefect stores it a moment after the run is suspended."""
    deadline = time.monotonic() + START_SECONDS
    while (answer := served.api.get(path)).status_code == 404 and time.monotonic() < deadline:
        time.sleep(0.1)
    return answer.raise_for_status().json()


@pytest.mark.parametrize(
    ("answer", "ended"),
    [
        ({"approved": True, "by": "Ada", "words": "short and right"}, "Promoted"),
        ({"approved": False, "by": "Ada", "words": ""}, "Rejected"),
    ],
)
def test_a_promotion_is_suspended_and_goes_on_as_a_person_decides(
    served: Served, answer: dict[str, Any], ended: str
) -> None:
    model = f"asked-{ended.lower()}"
    run_id, shown = _waiting(served, model)
    assert "Make asked" in shown and "accuracy" in shown and "trained says 0" in shown
    assert "<b>" not in shown and "\n# head" not in shown and "[link]" not in shown
    refused = served.api.post(f"/flow_runs/{run_id}/resume", json={"run_input": {"approved": True, "by": ""}})
    assert refused.json()["status"] == "REJECT"
    resumed = served.api.post(f"/flow_runs/{run_id}/resume", json={"run_input": answer}).raise_for_status()
    assert resumed.json()["status"] == "ACCEPT"
    run = served.wait(run_id)
    assert (run["state_type"], run["state_name"]) == ("COMPLETED", ended), served.messages(run_id)
    tags = _tags(served, model)
    assert (tags["promotion.decision"], tags["promotion.by"]) == (ended.lower(), "Ada")
    assert tags.get("promotion.words", "") == answer["words"]


def _tags(served: Served, model: str) -> dict[str, str]:
    import httpx2

    found = httpx2.get(
        f"{served.mlflow_url}/api/2.0/mlflow/model-versions/get", params={"name": model, "version": "1"}
    ).raise_for_status()
    return {tag["key"]: tag["value"] for tag in found.json()["model_version"]["tags"]}
