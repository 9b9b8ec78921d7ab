"""A training sharded over two hosts, by ssh: whatever dies, it goes on or names the host, and leaves nothing there."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.command import python_path
from grpo_core.config.files import dump_config, load_config, parse_config
from grpo_core.planning.plan import make_plan, plan_inputs
from tests.conftest import config_values, make_run, write_sums
from tests.e2e.hosts import Host, some_hosts
from tests.processes import parent, words
from tests.serving import hear_ctrl_c

pytestmark = pytest.mark.e2e

PROJECT = Path(__file__).parents[2]
SECONDS = 900.0  # of what has no limit of its own
LIMIT_SECONDS = 90.0  # in which everything on a host has ended once it is on its own

# Stands still in its fourth rollout until it may go on, or is told to stop.
REWARD = """
import os, time
from grpo_core.training import interrupt
calls = []
def patient(completions, completion_ids):
    calls.append(1)
    if len(calls) == 4 and not os.path.exists(os.environ["MAY_GO_ON"]):
        print("stuck", flush=True)
        while not os.path.exists(os.environ["MAY_GO_ON"]) and not interrupt._told.to_stop:
            time.sleep(0.05)
    return [-float(len(ids)) for ids in completion_ids]
"""


class Started:
    """A process, `python -m` with these words, and what it has said."""

    def __init__(self, environment: dict[str, str], *words: str | Path):
        self.process = subprocess.Popen(
            [sys.executable, "-m", *words],
            cwd=PROJECT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=hear_ctrl_c,
        )
        self.lines: list[str] = []
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())

    def until(self, pattern: str) -> None:
        wait_for(lambda: self.said(pattern) or self.process.poll() is not None)
        assert self.said(pattern), self.text

    def said(self, pattern: str) -> bool:
        return re.search(pattern, self.text) is not None

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def end(self) -> int:
        code = self.process.wait(SECONDS)
        self.reader.join()
        return code


def wait_for(condition: Callable[[], Any], seconds: float = SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s"
        time.sleep(0.1)


class Place:
    """Two hosts, the run directories, and what a training that nothing happens to ends with."""

    def __init__(self, folder: Path, model: Path, hosts: list[Host], environment: dict[str, str]):
        self.folder, self.hosts, self.go_on = folder, hosts, folder / "go-on"
        (folder / "patience.py").write_text(REWARD)
        path = python_path(folder, PROJECT)
        self.environment = {**environment, "PYTHONPATH": path, "MAY_GO_ON": str(self.go_on)}
        values = config_values(model, folder, max_steps=8, save_steps=1, sharding="full", num_processes=2)
        self.values = {**values, "rewards": [{"function": "patience:patient"}]}
        make_run(folder / "local", self.values)

    def run(self, name: str, **train: Any) -> Path:
        """A run directory for the two hosts; the present one, if there is one, with other keys."""
        values = {**self.values, "launch": {"launcher": "ssh", "hosts": [host.name for host in self.hosts]}}
        values["train"] = {**self.values["train"], "num_machines": 2, **train}
        run = self.folder / name
        if not run.exists():
            shutil.copytree(self.folder / "local", run, ignore=shutil.ignore_patterns("training"))
        config = parse_config(values)
        (run / "config.toml").write_text(dump_config(config))
        num_prompts = json.loads((run / "plan.json").read_text())["plan"]["num_prompts"]
        (run / "plan.json").write_text(json.dumps({"plan": asdict(make_plan(plan_inputs(config, num_prompts)))}))
        return run

    def start(self, run: Path) -> Started:
        """The stage train."""
        return Started(self.environment, "tests.e2e.train_on_hosts", run)

    def until_ended(self, seconds: float = LIMIT_SECONDS) -> None:
        wait_for(lambda: not any(host.left() for host in self.hosts), seconds)

    def undisturbed(self) -> list[dict[str, float]]:
        if not (self.folder / "local" / "training" / "result.json").exists():
            self.go_on.touch()
            stage = self.start(self.folder / "local")
            assert stage.end() == 0, stage.text
            self.go_on.unlink()
        return metrics(self.folder / "local")


def metrics(run: Path) -> list[dict[str, float]]:
    lines = (run / "training" / "metrics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if "time" not in key} for line in lines]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("hosts")
    with some_hosts(folder, "alpha", "beta") as (hosts, environment):
        yield Place(folder, model_folder, hosts, environment)


@pytest.fixture
def place(shared: Place) -> Iterator[Place]:
    shared.go_on.unlink(missing_ok=True)
    yield shared
    for host in shared.hosts:
        host.thaw()
        host.plug_in()
        for process in host.left():
            with suppress(psutil.NoSuchProcess):
                process.kill()


@contextmanager
def standing_still(place: Place, stage: Started) -> Iterator[Started]:
    """A training of which every process stands still in its fourth rollout."""
    try:
        for host in place.hosts:
            stage.until(rf"{host.name}: (rank \d: )?stuck")
        yield stage
    finally:
        stage.process.kill()
        stage.process.wait()


def test_two_hosts_end_with_what_two_processes_on_one_host_end_with(place: Place) -> None:
    place.go_on.touch()
    run = place.run("undisturbed")
    stage = place.start(run)
    assert stage.end() == 0, stage.text
    place.until_ended()
    assert metrics(run) == place.undisturbed()
    assert "step 8/8" in (run / "training" / "alpha.log").read_text()
    assert (run / "training" / "beta.log").exists()


def _kill_a_rank(host: Host) -> None:
    [rank] = [it for it in host.named("grpo_core.train") if "tasks.processes" not in " ".join(words(it))]
    rank.kill()


def _kill_the_supervisor(host: Host) -> None:
    not_guards = {None, *_ids(host, "supervise")}
    guard, *_ = [it for it in host.named("tasks.processes.supervise") if parent(it) not in not_guards]
    [supervisor] = [it for it in host.named("tasks.processes.supervise") if parent(it) == guard.pid]
    supervisor.kill()


def _kill_the_sessions(host: Host) -> None:
    for process in host.named("sshd:"):
        with suppress(psutil.NoSuchProcess):
            if "[listener]" not in " ".join(process.cmdline()):
                process.kill()


def _ids(host: Host, word: str) -> set[int]:
    return {process.pid for process in host.named(f"tasks.processes.{word}")}


def _cut_the_link(host: Host) -> None:
    host.unplug()


def _freeze(host: Host) -> None:
    host.freeze()


FAULTS = {
    _kill_a_rank: r"process 1 \(rank\) on .* was killed by SIGKILL",
    _kill_the_supervisor: r"machine beta ended with status 137 \(SIGKILL\)",
    _kill_the_sessions: "machine beta ended with status 254: the connection to it is lost",
    _cut_the_link: "machine beta ended with status 254: the connection to it is lost",
    _freeze: "machine beta ended with status 254: the connection to it is lost",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_what_happens_to_a_host_ends_the_training_by_name_or_is_survived(
    place: Place, fault: Callable[[Host], None]
) -> None:
    _, beta = place.hosts
    name = fault.__name__.strip("_")
    with standing_still(place, place.start(place.run(name))) as stage:
        fault(beta)
        assert stage.end() == 1
        assert stage.said("machine beta ended with status") and stage.said(FAULTS[fault]), stage.text
    if fault is not _freeze:
        place.until_ended()  # also on a host that is cut off
    beta.plug_in()
    beta.thaw()
    place.until_ended()
    with standing_still(place, place.start(place.run(name, max_restarts=1))) as stage:
        fault(beta)
        place.go_on.touch()  # only now: otherwise it may have finished before
        stage.until(r"restart 1 of 1 \(train.max_restarts\): machine beta ended")
        beta.plug_in()
        beta.thaw()
        assert stage.end() == 0, stage.text
    assert metrics(place.folder / name) == place.undisturbed()
    place.until_ended()


def test_a_network_that_goes_silent_between_the_hosts_is_noticed_named_and_survived(place: Place) -> None:
    """The stage still reaches both hosts, so no connection is lost: gloo waits, for an hour if nothing ends it."""
    alpha, beta = place.hosts
    run = place.run("silent", max_restarts=1, hang_timeout=5.0)
    with standing_still(place, place.start(run)) as stage:
        alpha.lose(beta)
        place.go_on.touch()
        stage.until(r"restart 1 of 1 .*: hang: all 2 processes wait for each other in sampling at .*distributed.py")
        alpha.find(beta)
        assert stage.end() == 0, stage.text
    assert metrics(run) == place.undisturbed()
    for rank, host in enumerate(("alpha", "beta")):
        stacks = (run / "training" / "ranks" / f"{rank}.stacks").read_text()
        assert re.search(rf"rank {rank} \({host}\), process \d+, in sampling", stacks) and "in share_samples" in stacks
    place.until_ended()


def test_a_cancelled_training_saves_and_ends_on_all_hosts_and_goes_on_from_there(place: Place) -> None:
    run = place.run("cancelled", save_steps=100)
    with standing_still(place, place.start(run)) as stage:
        stage.process.send_signal(signal.SIGINT)
        assert stage.end() != 0
        assert stage.said("told to stop, the checkpoint of step 3"), stage.text
    assert not any(host.left() for host in place.hosts)
    place.go_on.touch()
    stage = place.start(run)
    assert stage.end() == 0, stage.text
    assert json.loads((run / "training" / "result.json").read_text())["resumed_at_step"] == 3
    assert metrics(run) == place.undisturbed()


@pytest.mark.parametrize("how", ["killed", "frozen"])
def test_a_stage_that_is_gone_leaves_nothing_on_the_hosts(place: Place, how: str) -> None:
    with standing_still(place, place.start(place.run(how))) as stage:
        mine = [psutil.Process(stage.process.pid), *psutil.Process(stage.process.pid).children(recursive=True)]
        here = [process for process in mine if process.is_running()]
        for process in here:
            process.kill() if how == "killed" else process.suspend()
        try:
            place.until_ended()
        finally:
            for process in here:
                with suppress(psutil.NoSuchProcess):
                    process.kill()


def test_a_pipeline_survives_a_killed_process_and_evaluates_on_the_hosts_too(place: Place) -> None:
    write_sums(place.folder / "train.parquet", 10, 34)
    write_sums(place.folder / "eval.parquet", 60, 76)
    config = place.folder / "pipeline.toml"
    run = place.run("pipeline", max_restarts=1)
    config.write_text((run / "config.toml").read_text())
    storage = place.folder / "storage"
    environment = {**place.environment, "GRPO_STORAGE": str(storage)}
    with standing_still(place, Started(environment, "flows.cli.main", "run", config)) as command:
        _kill_a_rank(place.hosts[1])
        place.go_on.touch()
        assert command.end() == 0, command.text
    assert command.said(r"restart 1 of 1 \(train.max_restarts\)")
    place.until_ended()
    run = storage / "runs" / "test"
    assert json.loads((run / "training" / "result.json").read_text())["resumed_at_step"] == 3
    assert metrics(run) == place.undisturbed()
    assert (run / "evaluation" / "report.json").exists()
    assert (run / "evaluation" / "beta.log").exists()


def test_a_reward_that_fails_is_no_reason_to_start_again(place: Place) -> None:
    (place.folder / "failing.py").write_text("def failing(completions): raise ZeroDivisionError('no score')")
    run = place.run("failing", max_restarts=3)
    values = load_config(run / "config.toml").model_dump(mode="json", exclude_none=True)
    values["rewards"] = [{"function": "failing:failing"}]
    (run / "config.toml").write_text(dump_config(parse_config(values)))
    stage = place.start(run)
    assert stage.end() == 1
    assert stage.said("no score") and not stage.said("restart 1")
    place.until_ended()


def test_a_killed_process_of_four_in_a_hybrid_training_is_survived(place: Place) -> None:
    """Two processes per host, each host with the whole of the model between them."""
    run = place.run("hybrid", max_restarts=1, sharding="hybrid", num_processes=4, per_device_train_batch_size=4)
    with standing_still(place, place.start(run)) as stage:
        place.hosts[1].named("grpo_core.train")[-1].kill()
        place.go_on.touch()
        assert stage.end() == 0, stage.text
    assert stage.said("restart 1 of 1")
    place.until_ended()
    for found, expected in zip(metrics(run), place.undisturbed(), strict=True):
        assert found["reward"] == pytest.approx(expected["reward"], rel=1e-4)
        assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-3)
