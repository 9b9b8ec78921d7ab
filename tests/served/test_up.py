"""`grpo up` in a process of its own: what it serves and refuses, as from Prefect's UI, and commands beside it."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from itertools import takewhile
from pathlib import Path
from typing import Any

import psutil
import pytest

from tasks.stages import table
from tests.evaluations import fixed_samples, register_version
from tests.processes import wait_for, words
from tests.serving import START_SECONDS, STOP_SECONDS, Served, free_ports, run_grpo, run_up, starting

STAGES = [stage.name for stage in table.STAGES]

pytestmark = pytest.mark.slow


def test_the_terminal_shows_the_addresses_and_what_is_served_and_nothing_else_before_there_is_a_run(
    served: Served,
) -> None:
    lines = [*takewhile(lambda line: " | INFO " not in line, served.log.read_text().splitlines())]
    assert [line.split(" /")[0].split(" pipeline")[0] for line in lines] == [
        "Starting Prefect and MLflow over",
        f"Prefect  {served.prefect_url}  ready; writes to",
        f"MLflow   {served.mlflow_url}  ready; writes to",
        "Presets from",
        "Serving",
        f"Ready: start a run at {served.prefect_url}/deployments. Ctrl-C ends all of it.",
    ]
    for line in lines[1:3]:
        assert Path(line.split("writes to ")[1]).is_file()


@pytest.mark.e2e
def test_a_second_flow_run_of_a_configuration_waits_for_the_first_and_skips_every_stage(
    served: Served, changes: dict[str, Any]
) -> None:
    """Scheduled runs that came due while nothing served start like this."""
    twice = {**changes, "name": "twice"}
    ids = [served.trigger("pipeline/local", preset="quickstart", changes=twice) for _ in range(2)]
    for run_id in ids:
        run = served.wait(run_id)
        assert (run["state_type"], run["name"]) == ("COMPLETED", "twice"), served.messages(run_id)
    tasks = sorted(served.tasks(run_id, 5) for run_id in ids)
    assert tasks == sorted([(stage, state) for stage in STAGES] for state in ("Completed", "Skipped"))
    assert sum("waiting until it is free" in served.messages(run_id) for run_id in ids) == 1
    said = {served.get(f"/flow_runs/{run_id}")["state"]["message"] or "" for run_id in ids}
    assert [
        text for text in said if text.startswith("nothing to do: every stage of twice is up to date. To train again")
    ]


def test_a_value_out_of_bounds_and_an_unknown_key_are_refused_before_there_is_a_run(served: Served) -> None:
    for changes, said in [
        ({"train": {"learning_rate": -1}}, "changes.train.learning_rate"),
        ({"train": {"learning_rat": 1}}, "learning_rat"),
        ({"rollout": {"engine": "sglang"}}, "changes.rollout.engine"),
    ]:
        answer = served.request("pipeline/local", changes=changes)
        assert answer.status_code == 409
        assert said in answer.text


@pytest.mark.e2e
def test_the_form_runs_no_code(served: Served, changes: dict[str, Any], tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    rewards = [{"function": "os:system", "args": {"command": f"touch {ran}"}}]
    run = served.wait(served.trigger("pipeline/local", changes={**changes, "name": "evil", "rewards": rewards}))
    assert (run["state_type"], served.tasks(run["id"], 0)) == ("FAILED", [])
    assert "rewards.0.function = 'os:system': a deployment's parameters may name" in run["state"]["message"]
    assert not ran.exists()
    assert not (served.storage / "runs" / "evil").exists()


@pytest.mark.e2e
def test_values_that_do_not_go_together_fail_at_once_by_name(served: Served) -> None:
    changes = {"name": "ill-matched", "train": {"lr_scheduler_type": "constant"}}
    run = served.wait(served.trigger("pipeline/local", changes=changes))
    assert (run["state_type"], served.tasks(run["id"], 0)) == ("FAILED", [])
    assert "lr_scheduler_type='constant' ignores warmup_steps=0.06" in run["state"]["message"]
    assert not (served.storage / "runs" / "ill-matched").exists()


@pytest.mark.e2e
def test_a_stage_is_a_deployment_of_its_own_and_closes_what_a_killed_attempt_left_open(served: Served) -> None:
    run = served.wait(served.trigger("plan/local", run="twice"))  # of the test above
    assert (run["state_type"], served.tasks(run["id"], 1)) == ("COMPLETED", [("plan", "Skipped")])
    [left_open] = served.filter("task_runs", flow_runs={"id": {"any_": [run["id"]]}})
    running = {"state": {"type": "RUNNING"}, "force": True}
    served.api.post(f"/task_runs/{left_open['id']}/set_state", json=running).raise_for_status()
    served.retry(run["id"])
    assert served.tasks(run["id"], 2) == [("plan", "Crashed"), ("plan", "Skipped")]


def test_a_second_up_on_a_taken_port_is_refused_before_anything_starts(served: Served, tmp_path: Path) -> None:
    prefect_port, mlflow_port = _ports(served)
    free = str(free_ports(1)[0])
    for ports, taken in [((prefect_port, free), prefect_port), ((free, mlflow_port), mlflow_port)]:
        refused = run_up(tmp_path, *ports)
        assert (refused.returncode, refused.stdout) == (2, "")
        assert f"-port {taken}: the port is taken by a server of grpo over another storage, {served.storage}" in (
            refused.stderr
        )
        assert "Nothing was started. Free ports: --prefect-port " in refused.stderr
    assert not (tmp_path / "mlflow").exists()
    assert not list((tmp_path / "prefect").iterdir())


def test_a_second_up_of_one_storage_is_refused_on_other_ports_too(served: Served) -> None:
    refused = run_up(served.storage, *free_ports(2))
    assert refused.returncode == 2
    assert f"is served already at {served.prefect_url} and {served.mlflow_url}, by `grpo up`" in refused.stderr
    assert f"(process {served.process.pid} of " in refused.stderr


def test_serving_another_storage_s_server_is_refused(served: Served, tmp_path: Path) -> None:
    api = served.environment["PREFECT_API_URL"]
    for command in (["serve"], ["worker", "cpu"]):
        refused = run_grpo(tmp_path, *command, PREFECT_API_URL=api)
        assert refused.returncode == 2
        assert f"serves the storage {served.storage}, not {tmp_path}" in refused.stderr


@pytest.mark.e2e
def test_commands_join_the_server_of_their_storage(served: Served, storage: Path) -> None:
    register_version("joined", fixed_samples({"base": [0] * 10, "trained": [1] * 5 + [0] * 5}))
    refused = run_grpo(storage, "promote", "joined", "--set", "promotion.min_gain=0.95")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr.startswith("joined version 1: refused: ")
    assert len(refused.stderr.splitlines()) == 1
    [run] = served.filter("flow_runs", flow_runs={"name": {"any_": ["joined-candidate-promote"]}})
    assert (run["state_name"], run["tags"]) == ("Refused", ["grpo"])


def test_what_serving_needs_is_there(served: Served) -> None:
    limit: dict[str, Any] = served.get("/v2/concurrency_limits/grpo-training")
    assert limit["limit"] == 1


def _schedule(served: Served, preset: str, *options: str) -> subprocess.CompletedProcess[str]:
    folder = served.environment["GRPO_CONFIGS"]
    there = ("--deployment", "pipeline/local")  # other tests deploy to pools too
    return run_grpo(served.storage, "schedule", f"{folder}/{preset}.toml", *there, *options, GRPO_CONFIGS=folder)


def test_a_preset_and_changes_are_scheduled_from_the_command_line_and_replaced_by_name(served: Served) -> None:
    sets = ("--set", "name=nightly-{date}", "--set", "train.learning_rate=2e-5")
    for hour, said in [("1", "Versions of one: --set registry.model_name=NAME"), ("2", "")]:
        named = [] if said else ["--set", "registry.model_name=nightly"]
        done = _schedule(served, "maths", "--cron", f"0 {hour} * * *", "--timezone", "Europe/Berlin", *sets, *named)
        assert (done.returncode, done.stderr) == (0, "")
        assert f"pipeline/local runs nightly-{{date}} at '0 {hour} * * *' (Europe/Berlin)" in done.stdout
        assert said in done.stdout
    [schedule] = served.get("/deployments/name/pipeline/local")["schedules"]
    prefect = f"PREFECT_API_URL={served.environment['PREFECT_API_URL']} prefect"  # which finds no server by itself
    assert f"{prefect} deployment schedule delete pipeline/local {schedule['id']}" in done.stdout
    assert (schedule["active"], schedule["slug"]) == (True, "nightly-{date}")
    assert (schedule["schedule"]["cron"], schedule["schedule"]["timezone"]) == ("0 2 * * *", "Europe/Berlin")
    changes = {"name": "nightly-{date}", "train": {"learning_rate": 2e-5}, "registry": {"model_name": "nightly"}}
    assert schedule["parameters"] == {"preset": "maths", "changes": changes}
    for options, reason in [
        (["--cron", "0 25 * * *"], "--cron '0 25 * * *' --timezone 'UTC': "),
        (["--cron", "0 2 * * *", "--timezone", "Europe/Berlim"], "--timezone 'Europe/Berlim': "),
        (["--cron", "0 2 * * *", "--set", "train.lr=1"], "train.lr: unknown key"),
        (["--cron", "0 2 * * *", "--deployment", "pipeline/other"], "--deployment pipeline/other: choose one of"),
    ]:
        refused = _schedule(served, "maths", *options)
        assert (refused.returncode, refused.stdout) == (2, "")
        assert reason in refused.stderr
    assert len(served.get("/deployments/name/pipeline/local")["schedules"]) == 1


def test_a_new_preset_is_offered_without_a_restart_and_schedules_and_pauses_stay(served: Served) -> None:
    def known() -> dict[str, Any]:
        return served.get("/deployments/name/pipeline/local")

    before = known()
    served.api.patch(f"/deployments/{before['id']}", json={"paused": True, "concurrency_limit": 3}).raise_for_status()
    before = known()
    new = Path(served.environment["GRPO_CONFIGS"], "overnight.toml")
    new.write_text('# for tonight\nname = "overnight"\n')
    wait_for(
        lambda: "overnight" in known()["parameter_openapi_schema"]["properties"]["preset"]["enum"],
        START_SECONDS,
        served.log.read_text,
    )
    now = known()
    assert "# for tonight" in now["description"]
    assert [now[kept] for kept in ("id", "schedules", "paused")] == [before["id"], before["schedules"], True]
    assert now["global_concurrency_limit"]["limit"] == 3
    served.api.patch(f"/deployments/{before['id']}", json={"paused": False, "concurrency_limit": None})
    new.unlink()


@pytest.mark.e2e
def test_the_date_in_a_name_stays_that_on_which_the_flow_run_was_due_when_it_is_retried(served: Served) -> None:
    """The run is refused at once."""
    due = {"type": "SCHEDULED", "state_details": {"scheduled_time": "2026-01-02T23:30:00+00:00"}}
    changes = {"name": "due-{date}", "train": {"lr_scheduler_type": "constant"}}
    known = served.get("/deployments/name/pipeline/local")
    asked = {"state": due, "parameters": {"preset": "quickstart", "changes": changes}}
    run_id = served.api.post(f"/deployments/{known['id']}/create_flow_run", json=asked).raise_for_status().json()["id"]
    assert served.wait(run_id)["name"] == "due-2026-01-02"
    served.retry(run_id)
    # It is shown as crashed when its first process ends.
    wait_for(lambda: served.get(f"/flow_runs/{run_id}")["run_count"] > 1, START_SECONDS)
    assert served.wait(run_id)["name"] == "due-2026-01-02"


def _ports(served: Served) -> list[str]:
    return [url.rsplit(":", 1)[1] for url in (served.prefect_url, served.mlflow_url)]


@pytest.mark.e2e
def test_a_schedule_makes_runs_of_its_preset(served: Served) -> None:
    assert _schedule(served, "smallest", "--cron", "0 2 * * *").returncode == 0
    deployment = served.get("/deployments/name/pipeline/local")
    [schedule] = [it for it in deployment["schedules"] if it["slug"] == "smallest"]
    by_schedule = {"tags": {"all_": ["auto-scheduled"]}, "deployment_id": {"any_": [deployment["id"]]}}

    def presets() -> list[str]:
        return [it["parameters"]["preset"] for it in served.filter("flow_runs", flow_runs=by_schedule)]

    wait_for(lambda: "smallest" in presets(), START_SECONDS, served.log.read_text)
    served.api.delete(f"/deployments/{deployment['id']}/schedules/{schedule['id']}").raise_for_status()


@pytest.mark.e2e
@pytest.mark.parametrize(
    "begun", ["flows.serving.prefect_server", "mlflow.server", "flows.cli.main serve", "flows.serving.runner"]
)
def test_ctrl_c_pressed_twice_while_servers_start_leaves_none_and_no_traceback(begun: str, tmp_path: Path) -> None:
    with starting(tmp_path) as served:
        up = psutil.Process(served.process.pid)

        def has_begun() -> bool:
            assert up.is_running(), served.log.read_text()
            return any(begun in " ".join(words(it)) for it in up.children(recursive=True))

        wait_for(has_begun, START_SECONDS, served.log.read_text)
        started = up.children(recursive=True)
        for _ in range(2):
            os.killpg(up.pid, signal.SIGINT)
        assert served.process.wait(STOP_SECONDS) == 0
    assert not psutil.wait_procs(started, STOP_SECONDS)[1]
    assert not [log for log in served.logs if "Traceback" in log.read_text()]


def test_a_run_that_prefect_goes_on_with_is_kept_however_old(served: Served) -> None:
    def begin(flow: str, name: str, state: str, **parameters: Any) -> None:
        of = served.get(f"/deployments/name/{flow}/local")["flow_id"]
        asked = {"flow_id": of, "name": name, "parameters": parameters}
        path = f"/flow_runs/{served.api.post('/flow_runs/', json=asked).raise_for_status().json()['id']}/set_state"
        for reached in ("RUNNING", state):
            served.api.post(path, json={"state": {"type": reached}, "force": True}).raise_for_status()

    begin("pipeline", "asleep", "PAUSED")
    begin("pipeline", "over", "CANCELLED")
    begin("train", "over-train", "SCHEDULED", run="again")
    folders = [served.storage / "runs" / name for name in ("asleep", "over", "again")]
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "config.toml").touch()
    cleaned = run_grpo(served.storage, "clean", "--keep-days", "0", "--dry-run")
    for folder in folders:
        shutil.rmtree(folder)
    for name, fate in (("asleep", "kept"), ("over", "would be removed"), ("again", "kept")):
        assert f"{fate}  runs/{name}, " in cleaned.stdout, cleaned.stderr


def test_the_page_s_command_makes_prefects_server_write_what_it_waits_for_and_ends_nothing(served: Served) -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "troubleshooting.md").read_text()
    (pattern,) = re.findall(r"pkill -USR2 -f '([^']+)'", page)
    children = psutil.Process(served.process.pid).children(recursive=True)
    (server,) = (child for child in children if re.search(pattern, " ".join(child.cmdline())))  # as pkill does
    log = served.storage / "prefect" / "server.log"
    before = log.stat().st_size
    server.send_signal(signal.SIGUSR2)
    wait_for(lambda: "(most recent call first)" in log.read_text()[before:])
    assert served.api.get("/health").is_success and all(child.is_running() for child in children)
