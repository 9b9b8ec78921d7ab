"""prefect.yaml against a real Prefect server: what it deploys, where it runs, what a person is told when it fails; and
whom that server answers, how what serves its flows ends, and which flow runs its crash watch lets be."""

from __future__ import annotations

import json
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx2
import psutil
import pytest
from prefect.flows import load_flow_from_entrypoint

from flows.serving.environment import TAG
from flows.serving.find_server import STORAGE_HEADER, ask
from flows.serving.server_setup import LONGEST_SILENCE
from tasks.stages import table
from tests.conftest import config_values, write_data
from tests.serving import Served

PROJECT = Path(__file__).parents[2]
WORK_POOLS = PROJECT / "docs" / "how-to" / "work-pools"
STAGES = {stage.name: "gpu" if stage.gpu else "cpu" for stage in table.ALL_STAGES}

PREFECT = """
import gc, json, sys
gc.disable()  # nearly all of the time goes into imports, which leave no garbage
from prefect.cli import app
for command in json.loads(sys.argv[1]):
    sys.argv = ["prefect", "--no-prompt", *command]
    try:
        app()
    except SystemExit as end:
        if end.code:
            raise
"""

# SIGTERM arrives while Prefect's runner is in the middle of a step of its own: when it looks for flow runs to start.
SERVE_UNTIL_TOLD_WHILE_BUSY = """
import os, signal, subprocess, uuid
from prefect.runner._process_manager import ProcessHandle, ProcessManager
from prefect.runner._scheduled_run_poller import ScheduledRunPoller
from flows.serving import deployments
enter = ProcessManager.__aenter__
async def with_a_process_that_has_ended(manager):
    await enter(manager)
    process = subprocess.Popen(["true"])
    process.wait()
    await manager.add(uuid.uuid4(), ProcessHandle(process))
    return manager
ProcessManager.__aenter__ = with_a_process_that_has_ended
async def poll(*_):
    os.kill(os.getpid(), signal.SIGTERM)
ScheduledRunPoller._get_and_submit_flow_runs = poll
deployments.deployments = list
deployments.serve()
"""

pytestmark = pytest.mark.slow


def _prefect(server: Served, *commands: list[str], **variables: str) -> None:
    """Each `prefect COMMAND` in the project's folder; in one process, since its imports take longest."""
    done = subprocess.run(
        [sys.executable, "-c", PREFECT, json.dumps(commands)],
        cwd=PROJECT,
        env={**server.environment, **variables},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def _new_pool(name: str, kind: str, template: str) -> list[str]:
    return ["work-pool", "create", name, "--type", kind, "--base-job-template", str(WORK_POOLS / template)]


@contextmanager
def _worker(server: Served, pool: str) -> Iterator[psutil.Popen]:
    with (server.storage / f"worker-{pool}.log").open("ab") as output:
        command = [sys.executable, "-m", "flows.cli.main", "worker", pool]
        worker = psutil.Popen(command, env=server.environment, stdout=output, stderr=subprocess.STDOUT)
    try:
        yield worker
    finally:
        with suppress(psutil.NoSuchProcess):  # the test may have ended it
            worker.terminate()
        worker.wait(timeout=60)


@pytest.fixture(scope="module")
def deployed(served: Served) -> Served:
    """What prefect.yaml says, on pools of this machine."""
    pools = [_new_pool(pool, "process", "process-job.json") for pool in ("cpu", "gpu")]
    _prefect(served, *pools, ["deploy", "--all"])
    return served


def test_all_is_deployed_to_its_pool_with_the_form_and_no_schedule(deployed: Served) -> None:
    server = deployed
    for stage, pool in STAGES.items():
        known = server.get(f"/deployments/name/{stage}/{pool}")
        assert (known["work_pool_name"], set(known["parameter_openapi_schema"]["properties"])) == (
            pool,
            {"run", "force"},
        )
        assert load_flow_from_entrypoint(str(PROJECT / known["entrypoint"])).name == stage
    promote = {"model", "version", "force", "changes", "approval"}
    for flow, parameters in [("promote", promote), ("rollback", {"model"})]:
        known = server.get(f"/deployments/name/{flow}/cpu")
        assert set(known["parameter_openapi_schema"]["properties"]) == parameters
    known = server.get("/deployments/name/pipeline/cpu")
    assert known["enforce_parameter_schema"]
    assert "train" in known["parameter_openapi_schema"]["properties"]["changes"]["properties"]
    assert known["schedules"] == []


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "https://evil.example", "Content-Type": "text/plain"},  # asks no permission beforehand
        {"Origin": "http://localhost:1"},  # another server of this machine
        {"Origin": "https://127.0.0.1:{port}"},
        {"Origin": "http://127.0.0.1:{port}.evil.example"},
        {"Origin": "null"},  # a page in a sandboxed frame, or a file
        {"Origin": ""},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Dest": "iframe"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Dest": "document"},  # a form that posts
        {"Host": "evil.example:{port}"},  # rebinding: a name whose address becomes 127.0.0.1
        {"Host": "evil.example:{port}", "Origin": "http://evil.example:{port}"},
        {"Host": "localhost.evil.example"},
        {"Host": "evil:{port}", "Origin": "http://evil:{port}"},  # the same, by the local network's DNS
        {"Host": "127.0.0.1@evil.example:{port}"},
        {"Host": "127.0.0.1:port"},
        {"Host": ""},
    ],
    ids=str,
)
def test_a_foreign_page_changes_nothing_in_prefect_and_reads_nothing(deployed: Served, headers: dict[str, str]) -> None:
    port = deployed.prefect_url.rsplit(":", 1)[1]
    sent = {name: value.format(port=port) for name, value in headers.items()}
    before = deployed.get("/deployments/name/pipeline/cpu")
    path = f"/deployments/{before['id']}"
    step = {"prefect.deployments.steps.run_shell_script": {"script": "true"}}
    changed = {"name": "cpu", "flow_id": before["flow_id"], "pull_steps": [step]}
    preflight = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
    for answer in (
        deployed.api.post("/deployments/", json=changed, headers=sent),
        deployed.api.post(f"{path}/pause_deployment", headers=sent),
        deployed.api.post(f"{path}/create_flow_run", json={}, headers=sent),
        deployed.api.patch(path, json={"paused": True}, headers=sent),
        deployed.api.options("/deployments/", headers={**sent, **preflight}),
    ):
        assert answer.status_code == 403, answer.request
        assert not {"access-control-allow-origin", STORAGE_HEADER} & answer.headers.keys()
    for name in ("events/in", "events/out", "logs/out"):
        assert _websocket_status(deployed, name, sent) == 403
    if "document" not in sent.values():  # a link that somebody follows
        for url in (f"{deployed.prefect_url}/api{path}", deployed.prefect_url):
            assert httpx2.get(url, headers=sent).status_code == 403
    assert deployed.get("/deployments/name/pipeline/cpu") == before
    assert not deployed.filter("flow_runs", deployments={"id": {"any_": [before["id"]]}})


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
@pytest.mark.parametrize("origin", [None, "127.0.0.1", "localhost", "[::1]"])
def test_prefects_own_page_and_programs_are_answered(served: Served, host: str, origin: str | None) -> None:
    port = served.prefect_url.rsplit(":", 1)[1]
    headers = {"Host": f"{host}:{port}"}
    if origin:
        headers["Origin"] = f"http://{origin}:{port}"
        preflight = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
        allowed = served.api.options("/flows/filter", headers={**headers, **preflight}).raise_for_status()
        assert allowed.headers["access-control-allow-origin"] in ("*", headers["Origin"])
    assert served.api.post("/flows/filter", json={}, headers=headers).status_code == 200
    for name in ("events/in", "events/out", "logs/out"):
        assert _websocket_status(served, name, headers) == 101


def test_a_server_says_over_which_storage_it_is(served: Served) -> None:
    answer = ask(f"{served.prefect_url}/api")
    assert answer is not None
    assert answer.storage == str(served.storage)


def test_a_link_from_elsewhere_opens_prefects_page(served: Served) -> None:
    followed = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Dest": "document", "Sec-Fetch-Mode": "navigate"}
    assert httpx2.get(f"{served.prefect_url}/runs", headers=followed).status_code == 200


def _websocket_status(served: Served, name: str, headers: dict[str, str]) -> int:
    """Status that the server answers to a websocket's handshake; 101: open."""
    handshake = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
    handshake["Sec-WebSocket-Key"] = "dGhlIHNhbXBsZSBub25jZQ=="
    with httpx2.stream("GET", f"{served.prefect_url}/api/{name}", headers={**handshake, **headers}) as answer:
        return answer.status_code


@pytest.mark.e2e
def test_serving_that_is_told_to_end_while_it_is_busy_leaves_no_traceback(served: Served) -> None:
    command = [sys.executable, "-c", SERVE_UNTIL_TOLD_WHILE_BUSY]
    ended = subprocess.run(command, cwd=PROJECT, env=served.environment, capture_output=True, text=True, timeout=300)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_the_form_cannot_give_a_worker_another_command_folder_or_environment(deployed: Served) -> None:
    """Beside the parameters it has a field for job variables."""
    server = deployed
    path = f"/deployments/{server.get('/deployments/name/pipeline/cpu')['id']}/create_flow_run"
    for variables in (
        {"command": "touch /tmp/ran"},
        {"working_dir": "/tmp"},
        {"env": {"GRPO_REWARD_MODULES": "os"}},
        {"env": {"GRPO_GPU_DEPLOYMENT": "gpu", "PYTHONPATH": "/tmp"}},
        {"env.PYTHONPATH": "/tmp"},
        {"env": "PYTHONPATH=/tmp"},
    ):
        answer = server.api.post(path, json={"job_variables": variables})
        assert answer.status_code == 422, variables
    assert not server.filter("flow_runs", deployments={"name": {"any_": ["cpu"]}})


@pytest.mark.e2e
def test_the_pipeline_runs_on_one_pool_and_its_gpu_stages_on_another(
    deployed: Served, model_folder: Path, tmp_path: Path
) -> None:
    server = deployed
    write_data(tmp_path)
    changes = config_values(model_folder, tmp_path, max_steps=2, warmup_steps=0)
    with _worker(server, "cpu"), _worker(server, "gpu"):
        first = server.wait(server.trigger("pipeline/cpu", changes=changes))
        again = server.wait(server.trigger("pipeline/cpu", changes=changes))
    assert first["state_type"] == again["state_type"] == "COMPLETED", server.messages(first["id"])
    done = server.tasks(first["id"], 5)  # a handed-over stage is there under a name that Prefect makes up
    assert [state for _, state in done] == ["Completed"] * 5
    assert [name for name, _ in done if name in STAGES] == ["validate", "plan", "register"]
    assert server.tasks(again["id"], 3) == [(stage, "Skipped") for stage in ("validate", "plan", "register")]
    handed_over = server.filter("flow_runs", deployments={"name": {"any_": ["gpu"]}})
    assert {run["name"] for run in handed_over} == {"test-train", "test-evaluate"}
    assert len(handed_over) == 2


@pytest.mark.e2e
@pytest.mark.parametrize("kind", ["docker", "kubernetes"])
def test_the_definitions_for_containers_are_accepted(deployed: Served, kind: str) -> None:
    server = deployed
    variables = {
        "GRPO_IMAGE": "registry.internal/grpo-flows:1",
        "GRPO_STORAGE": "/mnt/grpo",
        "MLFLOW_TRACKING_URI": "http://mlflow.internal:5000",
    }
    deleted = [["work-pool", "delete", pool] for pool in ("cpu", "gpu")]
    pools = [_new_pool(pool, kind, f"{kind}-job.json") for pool in ("cpu", "gpu")]
    deploy = ["deploy", "--all", "--prefect-file", str(WORK_POOLS / f"{kind}.yaml")]
    _prefect(server, *deleted, *pools, deploy, **variables)
    known = server.get("/deployments/name/train/gpu")
    assert known["job_variables"]["image"] == f"{variables['GRPO_IMAGE']}-gpu"
    assert server.get("/deployments/name/plan/cpu")["job_variables"]["image"] == f"{variables['GRPO_IMAGE']}-cpu"
    assert known["job_variables"]["env"]["GRPO_STORAGE"] == "/storage"
    assert known["pull_steps"] == [{"prefect.deployments.steps.set_working_directory": {"directory": "/app"}}]
    template = server.get("/work_pools/gpu")["base_job_template"]
    assert known["job_variables"].keys() <= template["variables"]["properties"].keys()
    assert "shm" in json.dumps(known["job_variables"])


@pytest.mark.e2e
def test_serving_again_keeps_schedules_and_slots_as_their_user_left_them(served: Served) -> None:
    serve = "from flows.serving import deployments as d, server_setup as s\n"
    serve += "s.set_up(); [it.apply() for it in d.deployments()]"

    def serve_once() -> list[tuple[bool, str]]:
        subprocess.run([sys.executable, "-c", serve], cwd=PROJECT, env=served.environment, check=True, timeout=300)
        known = served.get("/deployments/name/pipeline/local")
        return sorted((schedule["active"], schedule["schedule"]["timezone"]) for schedule in known["schedules"])

    known = served.get("/deployments/name/pipeline/local")
    path, before = f"/deployments/{known['id']}/schedules", serve_once()
    further = {"active": False, "schedule": {"cron": "30 1 * * 1-5", "timezone": "Asia/Tokyo"}}
    served.api.post(path, json=[further]).raise_for_status()
    served.api.patch("/v2/concurrency_limits/grpo-training", json={"limit": 4}).raise_for_status()
    assert serve_once() == sorted([*before, (False, "Asia/Tokyo")])
    assert served.get("/v2/concurrency_limits/grpo-training")["limit"] == 4


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


@pytest.mark.e2e
def test_a_run_whose_process_sent_heartbeats_after_it_was_suspended_stays_suspended(
    served: Served, storage: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tasks.stages.attempts import repeat_suspension

    ended, killed = (_suspended_with_a_heartbeat_after(served) for _ in range(2))
    monkeypatch.setenv("PREFECT__FLOW_RUN_ID", ended)
    repeat_suspension()
    served.wait(killed, "CRASHED")
    assert served.get(f"/flow_runs/{ended}")["state_name"] == "Suspended"
