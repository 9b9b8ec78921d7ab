"""A flow run that waits for a person, over a real server: suspended, resumed with an answer, ended with it."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.command import python_path
from flows.serving.server_setup import CRASH_WATCH
from tasks.stages.table import STAGES
from tests.conftest import small_quickstart, write_inputs
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
    _register(served, model)
    run_id = served.trigger("promote/local", model=model)
    waiting = served.wait(run_id, "PAUSED")
    assert waiting["state_name"] == "Suspended"
    [watch] = [it for it in served.filter("automations") if it["name"] == CRASH_WATCH]
    assert served.events(SUSPENDED) and SUSPENDED in watch["trigger"]["expect"], "a run that waits is not crashed"
    keys = waiting["state"]["state_details"]["run_input_keyset"]
    return run_id, _shown(served, f"/flow_runs/{run_id}/input/{keys['description']}")


def _register(served: Served, model: str) -> None:
    command = [sys.executable, "-c", REGISTER, model]
    subprocess.run(command, cwd=PROJECT, env={**served.environment, "PYTHONPATH": python_path(PROJECT)}, check=True)


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
    assert "[version 1 in MLflow](" in shown  # a link shows the backslashes of escaped text
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
    assert _announced(served, model, f"grpo.{ended.lower()}") == ["grpo.waiting-for-approval", f"grpo.{ended.lower()}"]


def test_an_answer_is_kept_though_another_version_has_become_champion_meanwhile(served: Served) -> None:
    """The question was about the candidate, which is another version by then."""
    model = "overtaken.by others"
    run_id, _ = _waiting(served, model)
    _register(served, model)
    forced = served.wait(served.trigger("promote/local", model=model, force=True))
    assert forced["state_name"] == "Promoted", served.messages(forced["id"])
    answer = {"approved": True, "by": "Ada", "words": "too late"}
    served.api.post(f"/flow_runs/{run_id}/resume", json={"run_input": answer}).raise_for_status()
    run = served.wait(run_id)
    assert run["state_name"] == "Refused", served.messages(run_id)
    tags = _tags(served, model)
    assert (tags["promotion.against"], tags["promotion.by"], tags["promotion.words"]) == ("2", "Ada", "too late")
    rolled_back = served.wait(served.trigger("rollback/local", model=model))
    assert rolled_back["state_type"] == "FAILED", "there is no earlier champion"
    announced = ["grpo.waiting-for-approval", "grpo.promoted", "grpo.refused"]
    assert _announced(served, model, "grpo.refused") == announced


def test_a_pipeline_that_promotes_waits_for_a_person_and_ends_with_their_answer(served: Served, tmp_path: Path) -> None:
    """A policy that learns to say a 7, which is better than its base on nearly every prompt."""
    changes = small_quickstart(
        "asks",
        write_inputs(tmp_path),
        {"max_steps": 12, "learning_rate": 1e-2},
        rewards=[{"function": "format_regex", "args": {"pattern": "[0-9+=]*7[0-9+=]*"}}],
        registry={"model_name": "asks"},
        promotion={"automatic": True, "approval": True, "metric": "reward"},
    )
    run_id = served.trigger("pipeline/local", preset="quickstart", changes=changes)
    waiting = served.wait(run_id, "PAUSED")
    assert waiting["state_name"] == "Suspended"
    answer = {"approved": True, "by": "Ada", "words": "sevens"}
    served.api.post(f"/flow_runs/{run_id}/resume", json={"run_input": answer}).raise_for_status()
    assert served.wait(run_id)["state_type"] == "COMPLETED", served.messages(run_id)
    tags = _tags(served, "asks")
    assert (tags["promotion.decision"], tags["promotion.by"], tags["promotion.words"]) == ("promoted", "Ada", "sevens")
    stages = [stage.name for stage in STAGES]
    tasks = [task for task in served.tasks(run_id, 2 * len(stages) + 2) if task[0] in stages]
    assert tasks == [(stage, state) for state in ("Completed", "Skipped") for stage in stages]
    assert _announced(served, "asks", "grpo.promoted") == ["grpo.waiting-for-approval", "grpo.promoted"]
    completed = {"occurred": {"since": "2020-01-01T00:00:00Z"}, "event": {"name": ["grpo.run.completed"]}}
    assert len(served.api.post("/events/filter", json={"filter": completed}).json()["events"]) == 1


def _announced(served: Served, model: str, last: str) -> list[str]:
    """Names of the events about this model, in their order, once the last has arrived."""
    asked = {"occurred": {"since": "2020-01-01T00:00:00Z"}, "resource": {"id": [f"grpo.model.{model}"]}}
    deadline, found = time.monotonic() + START_SECONDS, list[str]()
    while last not in found and time.monotonic() < deadline:
        events = served.api.post("/events/filter", json={"filter": asked}).raise_for_status().json()["events"]
        found = [it["event"] for it in sorted(events, key=lambda it: it["occurred"])]
        time.sleep(0.2)
    return found


def _tags(served: Served, model: str) -> dict[str, str]:
    import httpx2

    found = httpx2.get(
        f"{served.mlflow_url}/api/2.0/mlflow/model-versions/get", params={"name": model, "version": "1"}
    ).raise_for_status()
    return {tag["key"]: tag["value"] for tag in found.json()["model_version"]["tags"]}
