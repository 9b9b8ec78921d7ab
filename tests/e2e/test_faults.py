"""What may go wrong in the middle of a served pipeline's training: no process stays, nothing is lost, the run shows how
it ended, and its retry finishes with the result of a run that nothing happened to."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest

from benchmarks.command import python_path
from tasks.stages import table
from tests.conftest import small_quickstart
from tests.e2e.holding import FUNCTION, write_held
from tests.e2e.place import metrics
from tests.processes import parent, wait_for, with_variables, words
from tests.serving import RUN_SECONDS, STOP_SECONDS, Served, grpo_serve, prefect_server, serving
from tests.small_disk import fill, small_disk

pytestmark = pytest.mark.e2e

STAGES = [stage.name for stage in table.STAGES]
UPDATES = 6
LEFT_FREE = 1 << 18  # bytes: two more updates' figures, but no checkpoint
SKIPPED = [("validate", "Skipped"), ("plan", "Skipped")]
FIRST = [("validate", "Completed"), ("plan", "Completed")]
REST = [("train", "Completed"), ("evaluate", "Completed"), ("register", "Completed")]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_held(tmp_path_factory.mktemp("inputs"))


def _environment(inputs: Path) -> dict[str, str]:
    """With the reward in it, which the form may name."""
    path = python_path(inputs, Path(__file__).parents[2])
    return {"PYTHONPATH": path, "GRPO_REWARD_MODULES": FUNCTION.partition(":")[0]}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, inputs: Path) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("served"), **_environment(inputs)) as servers:
        yield servers


@pytest.fixture(scope="module")
def undisturbed(served: Served, inputs: Path) -> dict[str, Any]:
    run_id = _trigger(served, inputs, "undisturbed")
    run = served.wait(run_id)
    assert run["state_type"] == "COMPLETED", served.messages(run_id)
    return _result(served, "undisturbed")


def _trigger(served: Served, inputs: Path, name: str) -> str:
    train = {"max_steps": UPDATES, "save_steps": 2, "warmup_steps": 1}
    changes = small_quickstart(name, inputs, train, rewards=[{"function": FUNCTION}])
    return served.trigger("pipeline/local", preset="quickstart", changes=changes)


@contextmanager
def _standing_still(served: Served, inputs: Path, name: str, rollout: int = 4) -> Iterator[str]:
    """A new flow run of the pipeline whose training stands still in this rollout until the body ends."""
    (inputs / "hold").write_text(str(rollout))
    try:
        run_id = _trigger(served, inputs, name)
        _until_still(served, name, rollout, run_id)
        yield run_id
    finally:
        (inputs / "hold").unlink(missing_ok=True)


def _until_still(served: Served, name: str, rollout: int, run_id: str) -> None:
    output = _partial(served, name) / "output.log"
    _until(lambda: output.exists() and f"still in rollout {rollout}" in output.read_text(), served, run_id)
    checkpoints = _partial(served, name) / "checkpoints"
    _until(lambda: not [*checkpoints.glob("*.tmp")], served, run_id)  # they are written while the training goes on


def _until(condition: Callable[[], Any], served: Served, run_id: str) -> None:
    wait_for(condition, RUN_SECONDS, lambda: f"flow run {run_id}:\n{served.log.read_text()[-4000:]}")


def _partial(served: Served, name: str) -> Path:
    return served.storage / "runs" / name / "training.partial"


def _of(run_id: str) -> list[psutil.Process]:
    """Every process of a flow run: they inherit its id."""
    return with_variables(PREFECT__FLOW_RUN_ID=run_id)


def _trainer(run_id: str) -> psutil.Process:
    (trainer,) = (p for p in _of(run_id) if words(p)[1:3] == ["-m", "grpo_core.train"])
    return trainer


def _flow_process(run_id: str) -> psutil.Process:
    processes = _of(run_id)
    (flow_process,) = (p for p in processes if parent(p) not in {None, *(other.pid for other in processes)})
    return flow_process


def _ended(served: Served, run_id: str, state: str) -> dict[str, Any]:
    """The flow run in this final state, when none of its processes is left."""
    run = served.wait(run_id)
    assert run["state_type"] == state, f"{run['state']}\n{served.messages(run_id)}"
    _until(lambda: not _of(run_id), served, run_id)
    return run


def _completed(served: Served, run_id: str) -> None:
    """A retry that comes before the failed process has gone is shown as crashed for an instant, and goes on."""

    def has_completed() -> bool:
        state = served.get(f"/flow_runs/{run_id}")["state"]
        assert state["type"] != "FAILED", f"{state}\n{served.messages(run_id)}"
        return state["type"] == "COMPLETED"

    _until(has_completed, served, run_id)
    _until(lambda: not _of(run_id), served, run_id)


def _result(served: Served, name: str) -> dict[str, Any]:
    """What a training comes to, except the time it took."""
    training = served.storage / "runs" / name / "training"
    return {
        "metrics": metrics(training.parent),
        "weights": hashlib.sha256((training / "model" / "model.safetensors").read_bytes()).hexdigest(),
        "counted": json.loads((training / "result.json").read_text())["counted"],
    }


def _resumed_at(served: Served, name: str) -> int | None:
    return json.loads((served.storage / "runs" / name / "training" / "result.json").read_text())["resumed_at_step"]


def test_a_killed_trainer_fails_its_run_and_the_retry_goes_on_from_the_last_checkpoint(
    served: Served, inputs: Path, undisturbed: dict[str, Any]
) -> None:
    with _standing_still(served, inputs, "trainer-killed") as run_id:
        _trainer(run_id).kill()
        run = _ended(served, run_id, "FAILED")
    assert "SIGKILL" in run["state"]["message"]
    served.retry(run_id)
    _completed(served, run_id)
    assert served.tasks(run_id, 8) == [*FIRST, ("train", "Failed"), *SKIPPED, *REST]
    assert _resumed_at(served, "trainer-killed") == 2
    assert _result(served, "trainer-killed") == undisturbed


def test_a_killed_flow_process_takes_its_training_along_and_the_retry_goes_on_from_the_last_update(
    served: Served, inputs: Path, undisturbed: dict[str, Any]
) -> None:
    with _standing_still(served, inputs, "flow-killed") as run_id:
        _flow_process(run_id).kill()
        _ended(served, run_id, "CRASHED")
    served.retry(run_id)
    _completed(served, run_id)
    assert served.tasks(run_id, 8) == [*FIRST, ("train", "Crashed"), *SKIPPED, *REST]
    assert _resumed_at(served, "flow-killed") == 3
    assert _result(served, "flow-killed") == undisturbed


def test_a_full_disk_fails_the_run_by_name_and_the_retry_goes_on_once_there_is_space(
    served: Served, inputs: Path, undisturbed: dict[str, Any]
) -> None:
    run_directory = served.storage / "runs" / "disk-full"
    with small_disk(run_directory, "64m"):
        with _standing_still(served, inputs, "disk-full") as run_id:
            filler = fill(run_directory, LEFT_FREE)
            (inputs / "hold").unlink()
            run = _ended(served, run_id, "FAILED")
        assert re.search(r"No space left on device: '.*/training\.partial/", run["state"]["message"])
        assert (_partial(served, "disk-full") / "checkpoints" / "step-000002").is_dir()
        filler.unlink()
        served.retry(run_id)
        _completed(served, run_id)
        assert _resumed_at(served, "disk-full") == 2
        assert _result(served, "disk-full") == undisturbed


def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_it_gives_the_same_result(
    served: Served, inputs: Path, undisturbed: dict[str, Any]
) -> None:
    with _standing_still(served, inputs, "damaged", rollout=6) as run_id:
        _trainer(run_id).kill()
        _ended(served, run_id, "FAILED")
    state = _partial(served, "damaged") / "checkpoints" / "step-000004" / "state.pt"
    content = bytearray(state.read_bytes())
    content[len(content) // 2] ^= 0xFF
    state.write_bytes(content)
    served.retry(run_id)
    _completed(served, run_id)
    assert _resumed_at(served, "damaged") == 2
    output = served.storage / "runs" / "damaged" / "training" / "output.log"
    assert "step-000004 is damaged (state.pt is not what was written)" in output.read_text()
    assert _result(served, "damaged") == undisturbed


def test_a_retry_before_the_failed_process_has_gone_is_kept(
    served: Served, inputs: Path, undisturbed: dict[str, Any]
) -> None:
    with _standing_still(served, inputs, "retried-at-once") as run_id:
        flow_process = _flow_process(run_id)
        _trainer(run_id).kill()
        _until(lambda: served.get(f"/flow_runs/{run_id}")["state_type"] == "FAILED", served, run_id)
        with suppress(psutil.NoSuchProcess):  # holds it at its end
            flow_process.suspend()
        served.retry(run_id)
        with suppress(psutil.NoSuchProcess):
            flow_process.resume()
    _completed(served, run_id)
    assert served.tasks(run_id, 8) == [*FIRST, ("train", "Failed"), *SKIPPED, *REST]
    assert _result(served, "retried-at-once") == undisturbed


def test_a_prefect_server_killed_in_mid_training_and_started_again_finds_the_run_completed(
    tmp_path: Path, inputs: Path, undisturbed: dict[str, Any]
) -> None:
    environment = _environment(inputs)
    with (
        prefect_server(tmp_path, **environment) as before,
        grpo_serve(before),
        _standing_still(before, inputs, "server-killed") as run_id,
    ):
        os.killpg(before.process.pid, signal.SIGKILL)
        before.process.wait()
        (inputs / "hold").write_text("6")
        _until_still(before, "server-killed", 6, run_id)
        with prefect_server(tmp_path, httpx2.URL(before.prefect_url).port, **environment) as after:
            (inputs / "hold").unlink()
            _until(lambda: after.get(f"/flow_runs/{run_id}")["state_type"] == "COMPLETED", after, run_id)
            assert after.tasks(run_id, 5) == [(stage, "Completed") for stage in STAGES]
            assert _resumed_at(after, "server-killed") is None
            assert _result(after, "server-killed") == undisturbed


def test_runs_interrupted_by_the_end_of_grpo_up_go_on_when_it_starts_again(
    tmp_path: Path, inputs: Path, undisturbed: dict[str, Any]
) -> None:
    environment, names = _environment(inputs), ("in-training", "waiting")
    with serving(tmp_path, **environment) as before, _standing_still(before, inputs, names[0]) as first:
        run_ids = [first, _trigger(before, inputs, names[1])]
        _until(lambda: "waiting for " in before.messages(run_ids[1]), before, run_ids[1])
        _until(lambda: len(_watched(tmp_path)) == len(run_ids), before, first)
        watched = _watched(tmp_path)
        before.process.terminate()
        assert before.process.wait(STOP_SECONDS) == 0
    with closing(sqlite3.connect(tmp_path / "prefect" / "prefect.db", isolation_level=None)) as database:
        # As if the events of the interruption had not been handled in time, and the machine had been off for an hour.
        values = f"({', '.join('?' * len(watched[0]))})"
        database.executemany(f"INSERT OR REPLACE INTO automation_bucket VALUES {values}", watched)
        database.execute('UPDATE automation_bucket SET count = 0, "end" = datetime("end", \'-1 hour\')')
    with serving(tmp_path, **environment) as after:
        for name, run_id in zip(names, run_ids, strict=True):
            _completed(after, run_id)
            states = [state["name"] for state in after.get(f"/flow_run_states/?flow_run_id={run_id}")]
            assert "AwaitingRetry" in states and "Crashed" not in states
            assert _result(after, name) == undisturbed


def _watched(storage: Path) -> list[tuple[Any, ...]]:
    """What the crash watch remembers: a row per flow run."""
    with closing(sqlite3.connect(storage / "prefect" / "prefect.db")) as database:
        return database.execute("SELECT * FROM automation_bucket").fetchall()


def test_after_a_reboot_the_run_triggered_again_goes_on_and_the_old_one_is_shown_as_crashed(
    tmp_path: Path, inputs: Path, undisturbed: dict[str, Any]
) -> None:
    environment = _environment(inputs)
    with serving(tmp_path, **environment) as before, _standing_still(before, inputs, "rebooted") as old:
        up = psutil.Process(before.process.pid)
        everything = [up, *up.children(recursive=True)]
        for process in everything:  # all of them, before any can react
            process.suspend()
        for process in everything:
            process.kill()
        before.process.wait()
        assert not psutil.wait_procs(everything, timeout=60)[1]
    with serving(tmp_path, **environment) as after:
        new = _trigger(after, inputs, "rebooted")
        _completed(after, new)
        assert after.tasks(new, 5) == [*SKIPPED, *REST]
        assert _resumed_at(after, "rebooted") == 2
        assert _result(after, "rebooted") == undisturbed
        assert after.wait(old)["state_type"] == "CRASHED"
