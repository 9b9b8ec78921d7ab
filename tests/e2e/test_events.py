"""Ends of runs and promotions reach other systems: Prefect's automations and MLflow's webhooks, over real servers."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
from cryptography.fernet import Fernet

from benchmarks.command import python_path
from examples.notifications.mlflow_webhook import SECRET, is_genuine
from grpo_core.config.base import flatten
from tests.conftest import small_quickstart, write_inputs
from tests.e2e.commands import run
from tests.processes import wait_for
from tests.serving import START_SECONDS, Served, free_ports, mlflow_server, prefect_server
from tests.web import Quiet, answering

pytestmark = pytest.mark.e2e

PROJECT = Path(__file__).parents[2]
SECONDS = 300
KEY = "known to both"
FLOW, DEPLOYMENT = "serve-champion", "local"

RUN = """
import sys
from pathlib import Path
from flows.parameters.form import changes_from_overrides
from flows.pipeline import pipeline
pipeline("quickstart", changes_from_overrides(Path("configs/quickstart.toml"), sys.argv[1:]), return_state=True)
"""
REFUSED = "from flows.pipeline import pipeline; pipeline('none', return_state=True)"
PROMOTED = """
from flows.promotion import promote
from tests.evaluations import fixed_samples, register_version
register_version('the "sums"', fixed_samples({"base": [0] * 9, "trained": [1] * 9}))
promote('the "sums"')
"""
ROLLED_BACK = """
from flows.promotion import promote, rollback
from tests.evaluations import fixed_samples, register_version
register_version('the "sums"', fixed_samples({"base": [0] * 9, "trained": [1] * 9}))
promote('the "sums"', force=True)
rollback('the "sums"')
"""
INTERRUPTED = """
from prefect import flow
from tasks.reports.events import announce_end
from tasks.stages.endings import end_in_plain_words
@flow(name="pipeline", flow_run_name="ctrl-c", on_cancellation=[announce_end])
@end_in_plain_words
def interrupted():
    raise KeyboardInterrupt
interrupted(return_state=True)
"""


LATE = """
import sys
from datetime import timedelta
from prefect.events import emit_event
from examples.notifications.webhook import notify
notify(sys.argv[1], timedelta(seconds=10), timedelta(seconds=5))
payload = {"model": "old", "version": "3", "text": "old version 3 is champion"}
emit_event("grpo.promoted", {"prefect.resource.id": "grpo.model.old"}, payload=payload)
"""


@dataclass(frozen=True)
class Call:
    headers: Mapping[str, str]
    body: bytes

    @property
    def said(self) -> dict[str, Any]:
        return json.loads(self.body)


@dataclass(frozen=True)
class Set:
    """`prefect`, its server; `environment`: of processes that are to find both; `url`: of a receiver, `/mlflow` on it
    for MLflow; `calls`: what has arrived, by path."""

    prefect: Served
    environment: dict[str, str]
    url: str
    calls: dict[str, Queue[Call]]

    def run(self, *command: str) -> None:
        run([sys.executable, *command], PROJECT, self.environment)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Set]:
    calls: dict[str, Queue[Call]] = {"/prefect": Queue(), "/mlflow": Queue()}

    class Receiver(Quiet):
        def do_POST(self) -> None:
            calls[self.path].put(Call(self.headers, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

    folder = tmp_path_factory.mktemp("events")
    [port] = free_ports(1)
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("MLFLOW_WEBHOOK_SECRET_ENCRYPTION_KEY", Fernet.generate_key().decode())
        patch.setenv("MLFLOW_WEBHOOK_ALLOWED_SCHEMES", "http")
        patch.setenv("MLFLOW_WEBHOOK_ALLOW_PRIVATE_IPS", "true")
        patch.setenv("MLFLOW_WEBHOOK_CACHE_TTL", "0")
        stack.enter_context(mlflow_server(folder, port))
        (storage := folder / "storage").mkdir()
        prefect = stack.enter_context(prefect_server(storage))
        receiver = stack.enter_context(answering(Receiver))
        environment = {**prefect.environment, "PYTHONPATH": python_path(PROJECT), SECRET: KEY}
        environment["MLFLOW_TRACKING_URI"] = f"http://127.0.0.1:{port}"
        yield Set(prefect, environment, receiver, calls)


@pytest.fixture(scope="module")
def listening(servers: Set) -> Set:
    """With what the three examples make."""
    flow = servers.prefect.api.post("/flows/", json={"name": FLOW}).raise_for_status().json()["id"]
    deployment = {"name": DEPLOYMENT, "flow_id": flow, "enforce_parameter_schema": False}
    servers.prefect.api.post("/deployments/", json=deployment).raise_for_status()
    for script, argument in [
        ("webhook", f"{servers.url}/prefect"),
        ("start_deployment", f"{FLOW}/{DEPLOYMENT}"),
        ("mlflow_webhook", f"{servers.url}/mlflow"),
    ]:
        for _ in range(2):  # what was made is made again, not a second time
            servers.run(f"examples/notifications/{script}.py", argument)
    return servers


def test_a_completed_run_is_announced_with_its_figures_and_its_version_by_mlflow(
    listening: Set, tmp_path: Path
) -> None:
    changes = flatten(small_quickstart("announced", write_inputs(tmp_path, 16), {"max_steps": 2}))
    listening.run("-c", RUN, *(f"{key}={value}" for key, value in changes.items()))
    report = json.loads((listening.prefect.storage / "runs/announced/evaluation/report.json").read_text())
    metric = report["deciding_metric"]
    own = report["sets"]["held-out"]["policies"]["trained"][metric]
    events = listening.prefect.events("grpo.training.completed", "grpo.run.completed")
    training, ended = (events[f"grpo.{kind}.completed"] for kind in ("training", "run"))
    assert (training["run"], training["updates"], training["planned_updates"]) == ("announced", 2, 2)
    assert ended["metric"] == metric
    assert [ended[it] for it in ("value", "low", "high")] == [own[it] for it in ("mean", "low", "high")]
    assert (ended["model"], ended["version"]) == ("arithmetic", "1")
    assert ended["mlflow_url"] == training["mlflow_url"]
    assert ended["mlflow_url"].startswith(listening.environment["MLFLOW_TRACKING_URI"])
    assert listening.calls["/prefect"].get(timeout=SECONDS).said == {"text": ended["text"]}
    for call in _of_mlflow(listening, {"name": "arithmetic", "version": "1", "alias": "candidate"}):
        assert is_genuine(call.headers, call.body, KEY)
        assert not is_genuine(call.headers, call.body, "guessed")
        assert not is_genuine(call.headers, call.body.replace(b"arithmetic", b"arithmetik"), KEY)
        assert not is_genuine({**call.headers, "X-MLflow-Timestamp": "1700000000"}, call.body, KEY)
        assert not is_genuine({**call.headers, "X-MLflow-Signature": "v1,é"}, call.body, KEY)
        assert not is_genuine({}, call.body, KEY)


def _of_mlflow(servers: Set, last: dict[str, str]) -> list[Call]:
    """What MLflow has POSTed, up to the call with this data."""
    found = [servers.calls["/mlflow"].get(timeout=SECONDS)]
    while found[-1].said["data"] != last:
        found.append(servers.calls["/mlflow"].get(timeout=SECONDS))
    return found


def test_a_failed_run_and_one_ended_by_ctrl_c_are_announced(listening: Set) -> None:
    listening.run("-c", REFUSED)
    listening.run("-c", INTERRUPTED)
    events = listening.prefect.events("grpo.run.failed", "grpo.run.cancelled")
    assert "preset = 'none': neither a preset" in events["grpo.run.failed"]["reason"]
    assert events["grpo.run.cancelled"]["resource"]["prefect.resource.id"] == "grpo.run.ctrl-c"
    assert events["grpo.run.cancelled"]["reason"] == "interrupted; run the same again to continue"
    said = listening.calls["/prefect"].get(timeout=SECONDS).said["text"]
    assert said.startswith("pipeline: run refused is Failed. http")


def test_each_new_champion_is_announced_and_starts_a_deployment_also_after_a_rollback(listening: Set) -> None:
    listening.run("-c", PROMOTED)
    said = listening.calls["/prefect"].get(timeout=SECONDS).said["text"]
    assert said.startswith('the "sums" version 1 is champion (promoted): accuracy on held-out 100.0% against')
    event = listening.prefect.events("grpo.promoted")["grpo.promoted"]
    assert (event["decision"], event["against"], event["value"], event["rival"]) == ("promoted", "base", 1.0, 0.0)
    of_flow = {"flows": {"name": {"any_": [FLOW]}}}
    started = wait_for(lambda: listening.prefect.filter("flow_runs", **of_flow), START_SECONDS)
    assert [run["parameters"] for run in started] == [{"model": 'the "sums"', "version": "1"}]
    calls = [call.said for call in _of_mlflow(listening, {"name": 'the "sums"', "version": "1", "alias": "champion"})]
    tags = {call["data"]["key"]: call["data"]["value"] for call in calls if call["entity"] == "model_version_tag"}
    assert tags["promotion.decision"] == "promoted"

    listening.run("-c", ROLLED_BACK)  # to version 1, from a second one
    texts = [listening.calls["/prefect"].get(timeout=SECONDS).said["text"] for _ in range(2)]
    assert any(text.startswith('the "sums" version 2 is champion (forced)') for text in texts), texts

    def versions() -> list[str]:
        return sorted(run["parameters"]["version"] for run in listening.prefect.filter("flow_runs", **of_flow))

    assert wait_for(lambda: len(versions()) > 2 and versions(), START_SECONDS) == ["1", "1", "2"]


def test_a_champion_that_is_old_and_a_run_that_is_overdue_are_announced_once(listening: Set) -> None:
    api = listening.prefect.api
    listening.run("-c", LATE, f"{listening.url}/prefect")
    flow = api.post("/flows/", json={"name": "pipeline"}).raise_for_status().json()["id"]
    for name, states in (("in-time", ("RUNNING", "COMPLETED")), ("slow", ("RUNNING",))):
        run = api.post("/flow_runs/", json={"flow_id": flow, "name": name}).raise_for_status().json()["id"]
        for state in states:
            api.post(f"/flow_runs/{run}/set_state", json={"state": {"type": state}}).raise_for_status()
    said = [listening.calls["/prefect"].get(timeout=SECONDS).said["text"] for _ in range(3)]
    assert [text.partition(" http")[0] for text in sorted(said)] == [
        "old version 3 has been champion for long",
        "old version 3 is champion",
        "pipeline: run slow has no result yet.",
    ]
