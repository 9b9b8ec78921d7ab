"""A training sharded over two hosts, by ssh: whatever dies, it goes on or names the host, and leaves nothing there."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from grpo_core.config.files import dump_config, load_config, parse_config
from tests.conftest import write_data
from tests.e2e.hosts import Host, some_hosts
from tests.e2e.place import Place, Started, metrics, resumed_at_step, standing_still
from tests.processes import parent, wait_for, words

pytestmark = pytest.mark.e2e

LIMIT_SECONDS = 90.0  # in which everything on a host has ended once it is on its own


class Hosts(Place):
    def __init__(self, folder: Path, model: Path, hosts: list[Host], environment: dict[str, str]):
        self.hosts, self.machines = hosts, [host.name for host in hosts]
        super().__init__(folder, model, environment, {"launcher": "ssh", "hosts": self.machines})

    def until_ended(self, seconds: float = LIMIT_SECONDS) -> None:
        wait_for(lambda: not any(host.left() for host in self.hosts), seconds)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Iterator[Hosts]:
    folder = tmp_path_factory.mktemp("hosts")
    with some_hosts(folder, "alpha", "beta") as (hosts, environment):
        yield Hosts(folder, model_folder, hosts, environment)


@pytest.fixture
def place(shared: Hosts) -> Iterator[Hosts]:
    shared.go_on.unlink(missing_ok=True)
    yield shared
    for host in shared.hosts:
        host.restore()


def test_two_hosts_end_with_what_two_processes_on_one_host_end_with(place: Hosts) -> None:
    place.go_on.touch()
    run = place.run("undisturbed")
    place.finish(run)
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


FAULTS = {
    _kill_a_rank: r"process 1 \(rank\) on .* was killed by SIGKILL",
    _kill_the_supervisor: r"machine beta ended with status 137 \(SIGKILL\)",
    _kill_the_sessions: "machine beta ended with status 254: the connection to it is lost",
    Host.unplug: "machine beta ended with status 254: the connection to it is lost",
    Host.freeze: "machine beta ended with status 254: the connection to it is lost",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_what_happens_to_a_host_ends_the_training_by_name_or_is_survived(
    place: Hosts, fault: Callable[[Host], None]
) -> None:
    _, beta = place.hosts
    name = fault.__name__.strip("_")
    with standing_still(place, place.start(place.run(name))) as stage:
        fault(beta)
        assert stage.end() == 1
        assert stage.said("machine beta ended with status") and stage.said(FAULTS[fault]), stage.text
    if fault is not Host.freeze:
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


def test_a_network_that_goes_silent_between_the_hosts_is_noticed_named_and_survived(place: Hosts) -> None:
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


def test_a_cancelled_training_saves_and_ends_on_all_hosts_and_goes_on_from_there(place: Hosts) -> None:
    run = place.run("cancelled", save_steps=100)
    place.cancel(run)
    assert not any(host.left() for host in place.hosts)
    place.go_on.touch()
    place.finish(run)
    assert resumed_at_step(run) == 3
    assert metrics(run) == place.undisturbed()


@pytest.mark.parametrize("how", ["killed", "frozen"])
def test_a_stage_that_is_gone_leaves_nothing_on_the_hosts(place: Hosts, how: str) -> None:
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


def test_a_pipeline_survives_a_killed_process_and_evaluates_on_the_hosts_too(place: Hosts) -> None:
    write_data(place.folder)
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
    assert resumed_at_step(run) == 3
    assert metrics(run) == place.undisturbed()
    assert (run / "evaluation" / "report.json").exists()
    assert (run / "evaluation" / "beta.log").exists()


def test_a_reward_that_fails_is_no_reason_to_start_again(place: Hosts) -> None:
    (place.folder / "failing.py").write_text("def failing(completions): raise ZeroDivisionError('no score')")
    run = place.run("failing", max_restarts=3)
    values = load_config(run / "config.toml").model_dump(mode="json", exclude_none=True)
    values["rewards"] = [{"function": "failing:failing"}]
    (run / "config.toml").write_text(dump_config(parse_config(values)))
    stage = place.start(run)
    assert stage.end() == 1
    assert stage.said("no score") and not stage.said("restart 1")
    place.until_ended()


def test_a_killed_process_of_four_in_a_hybrid_training_is_survived(place: Hosts) -> None:
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
