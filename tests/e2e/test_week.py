"""An operator's week: a run is due each night, and nearly each night something happens to it. Nothing is lost, nothing
is trained twice, and `grpo status` is right after each night."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import tomli_w
from mlflow import MlflowClient

from benchmarks.command import ROOT, python_path
from tests.conftest import config_values, make_model
from tests.e2e.holding import write_patient
from tests.processes import runs, wait_for, words
from tests.serving import Served, serving
from tests.small_disk import fill, small_disk
from tests.users import run_as, users

pytestmark = pytest.mark.e2e

UPDATES, SAVED = 6, 3  # of a training; when it stands still in the fourth rollout and is told to end
MONDAY, TUESDAY, WEDNESDAY, THURSDAY, FRIDAY, SATURDAY, SUNDAY = (f"2026-11-{day}" for day in range(16, 23))
STORAGES = ROOT / "tests" / "storages"


@dataclass(frozen=True)
class Project:
    """A folder with a configuration `nightly`, and a storage on a small disk that a group shares."""

    folder: Path
    storage: Path
    colleague: str

    @property
    def go_on(self) -> Path:
        """File without which trainings stand still in their fourth rollout."""
        return self.folder / "go-on"

    @property
    def variables(self) -> dict[str, str]:
        path = python_path(self.folder, ROOT)
        return {"GRPO_CONFIGS": str(self.folder / "configs"), "PYTHONPATH": path, "MAY_GO_ON": str(self.go_on)}

    def up(self) -> Any:
        return serving(self.storage, **self.variables)

    def grpo(self, *arguments: str | Path, storage: Path | None = None) -> tuple[int, str]:
        """Exit status and output of a command of the operator."""
        done = subprocess.run(
            [sys.executable, "-m", "flows.cli.main", *map(str, arguments)],
            cwd=storage or self.folder,
            env={**os.environ, **self.variables, "GRPO_STORAGE": str(storage or self.storage), "COLUMNS": "200"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=1200,
        )
        return done.returncode, done.stdout

    def run(self, night: str) -> Path:
        return self.storage / "runs" / f"nightly-{night}"

    def stands_still(self, night: str) -> bool:
        output = self.run(night) / "training.partial" / "output.log"
        return output.exists() and "stuck in the fourth rollout" in output.read_text()


@pytest.fixture
def project() -> Iterator[Project]:
    with tempfile.TemporaryDirectory() as name, users("team") as [colleague]:
        folder, before = Path(name), os.umask(0o002)
        folder.chmod(0o755)
        make_model(folder / "model")
        for file in (folder / "model").iterdir():
            file.chmod(0o644)
        write_patient(folder)
        values = config_values(folder / "model", folder, max_steps=UPDATES, save_steps=100)
        values |= {"name": "nightly", "rewards": [{"function": "patience:patient"}]}
        (folder / "configs").mkdir()
        (folder / "configs" / "nightly.toml").write_text(tomli_w.dumps(values))
        with small_disk(folder / "disk", "400M"):
            (storage := folder / "disk" / "storage").mkdir()
            shutil.chown(storage, group=f"team-{colleague.rpartition('-')[2]}")
            storage.chmod(0o2770)
            yield Project(folder, storage, colleague)
        os.umask(before)


def due(served: Served, night: str) -> str:
    """Id of the flow run that the schedule makes for this night."""
    known = served.get("/deployments/name/pipeline/local")
    [schedule] = known["schedules"]
    state = {"type": "SCHEDULED", "state_details": {"scheduled_time": f"{night}T02:00:00Z"}}
    body = {"parameters": schedule["parameters"], "state": state}
    return served.api.post(f"/deployments/{known['id']}/create_flow_run", json=body).raise_for_status().json()["id"]


def processes_of(served: Served, run: Path) -> list[psutil.Process]:
    """Those that serve this run, the flow's own first."""
    found = psutil.Process(served.process.pid).children(recursive=True)
    training = [it for it in found if runs(it) and str(run) in " ".join(words(it))]
    flows = [it for it in found if runs(it) and "prefect.engine" in " ".join(words(it))]
    assert training and flows
    return [*flows, *training]


def check(project: Project, *nights: str) -> None:
    """Each of these nights, and no other, is done once and completely."""
    for night in nights:
        status, said = project.grpo("status", f"nightly-{night}")
        assert status == 0, said
        lines = (project.run(night) / "training" / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == [*range(1, UPDATES + 1)]
    client = MlflowClient(f"sqlite:///{project.storage / 'mlflow' / 'mlflow.db'}")
    versions = client.search_model_versions("name = 'nightly'")
    assert sorted(it.tags["run"] for it in versions) == sorted(f"nightly-{night}" for night in nights)


def unfinished(project: Project, night: str) -> None:
    status, said = project.grpo("status", f"nightly-{night}")
    assert status == 1 and f"{SAVED} of {UPDATES} updates saved" in said, said


def test_a_week_of_nightly_runs_loses_nothing_and_trains_nothing_twice(project: Project) -> None:
    with project.up() as served:
        options = ["--cron", "0 2 * * *", "--set", "name=nightly-{date}", "--set", "registry.model_name=nightly"]
        status, said = project.grpo("schedule", project.folder / "configs" / "nightly.toml", *options)
        assert status == 0, said
        project.go_on.touch()
        assert served.wait(due(served, MONDAY))["state_type"] == "COMPLETED"
        check(project, MONDAY)
        again = served.wait(due(served, MONDAY))
        assert "nothing to do: every stage of nightly-2026-11-16 is up to date" in again["state"]["message"]
        check(project, MONDAY)
        project.go_on.unlink()
        tuesday = due(served, TUESDAY)
        wait_for(lambda: project.stands_still(TUESDAY))
    unfinished(project, TUESDAY)  # `grpo up` was told to end
    project.go_on.touch()
    with project.up() as served:
        assert served.wait(tuesday)["state_type"] == "COMPLETED"
        check(project, MONDAY, TUESDAY)
        crash(project, served, WEDNESDAY)
        suspend(project, served, THURSDAY, FRIDAY)
        done = run_as(project.colleague, "002", "status", f"nightly-{MONDAY}", GRPO_STORAGE=str(project.storage))
        assert done.returncode == 0, done.stderr
        own = ["--set", "name=colleague", "--set", "registry.model_name=colleague"]
        command = ["run", project.folder / "configs" / "nightly.toml", *own]
        done = run_as(project.colleague, "002", *command, GRPO_STORAGE=str(project.storage), **project.variables)
        assert done.returncode == 0, done.stdout + done.stderr
        fill_the_disk(project, served, SATURDAY)
        assert served.wait(due(served, SUNDAY))["state_type"] == "COMPLETED"
        check(project, MONDAY, TUESDAY, WEDNESDAY, THURSDAY, FRIDAY, SATURDAY, SUNDAY)
    earlier = shutil.copytree(max(STORAGES.glob("[0-9]*")), project.folder / "earlier")
    status, said = project.grpo("status", "sums", storage=earlier)
    assert status == 0, said
    for stage in ("train", "evaluate"):
        status, said = project.grpo("stage", stage, "--run", "sums", storage=earlier)
        assert status == 0 and f"{stage}: up to date" in said, said


def crash(project: Project, served: Served, night: str) -> None:
    """The flow's process is killed; a person retries the run."""
    project.go_on.unlink()
    run_id = due(served, night)
    wait_for(lambda: project.stands_still(night))
    flow, *_ = processes_of(served, project.run(night))
    flow.kill()
    assert served.wait(run_id)["state_type"] in ("CRASHED", "FAILED")
    unfinished(project, night)
    project.go_on.touch()
    retry(served, run_id)
    check(project, MONDAY, TUESDAY, night)


def suspend(project: Project, served: Served, night: str, next_night: str) -> None:
    """A night's run is suspended, the next one uses its slot, and then it is resumed."""
    project.go_on.unlink()
    run_id = due(served, night)
    wait_for(lambda: project.stands_still(night))
    served.suspend(run_id)
    wait_for(lambda: (project.run(night) / "training.partial" / "checkpoints" / f"step-{SAVED:06d}").exists())
    project.go_on.touch()
    assert served.wait(due(served, next_night))["state_type"] == "COMPLETED"
    assert served.get(f"/flow_runs/{run_id}")["state_name"] == "Suspended"
    unfinished(project, night)
    served.resume(run_id)
    assert served.wait(run_id)["state_type"] == "COMPLETED"
    check(project, MONDAY, TUESDAY, WEDNESDAY, night, next_night)


def fill_the_disk(project: Project, served: Served, night: str) -> None:
    """The disk is full when a night's training is to save; with room again, the run is retried."""
    project.go_on.unlink()
    run_id = due(served, night)
    wait_for(lambda: project.stands_still(night))
    training = [it for it in processes_of(served, project.run(night)) if "grpo_core.train" in words(it)]
    filler = fill(project.storage.parent)
    training[-1].terminate()
    wait_for(lambda: not any(map(runs, training)))
    filler.unlink()
    project.go_on.touch()
    assert served.wait(run_id)["state_type"] != "COMPLETED"
    retry(served, run_id)
    check(project, MONDAY, TUESDAY, WEDNESDAY, THURSDAY, FRIDAY, night)


def retry(served: Served, run_id: str) -> None:
    """Retry a run that has failed, to its end."""
    served.retry(run_id)
    wait_for(lambda: served.get(f"/flow_runs/{run_id}")["state_type"] in ("RUNNING", "COMPLETED"))
    assert served.wait(run_id)["state_type"] == "COMPLETED"
