"""A training sharded over two nodes of a real Slurm: what is taken away comes back, and nothing is left."""

from __future__ import annotations

import re
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from grpo_core.config.files import dump_config, parse_config
from tests.conftest import config_values, make_model, make_run, write_data
from tests.e2e.place import Place, Started, metrics, resumed_at_step, standing_still
from tests.e2e.slurm import NODES, Cluster, slurm_cluster
from tests.grpo_core.rollout.vllm_engine import PACKED
from tests.processes import wait_for, words

pytestmark = pytest.mark.e2e

JOB = {"launcher": "slurm", "slurm": ["--partition=low", "--time=1:00:00"]}
SILENT_SECONDS = 150.0  # in which machines notice that their stage is gone, and end everything


class Nodes(Place):
    machines = NODES

    def __init__(self, folder: Path, model: Path, cluster: Cluster):
        self.cluster = cluster
        super().__init__(folder, model, cluster.environment, JOB)

    def nothing_is_left(self, run: Path) -> bool:
        left = [process for node in NODES for process in self.cluster.running_on(node)]
        return not left and not self.cluster.jobs() and not [*(run / "training").glob(".machines-*")]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Iterator[Nodes]:
    folder = tmp_path_factory.mktemp("slurm")
    with slurm_cluster(folder) as cluster:
        yield Nodes(folder, model_folder, cluster)


@pytest.fixture
def place(shared: Nodes) -> Iterator[Nodes]:
    shared.go_on.unlink(missing_ok=True)
    yield shared
    for job in shared.cluster.jobs():
        shared.cluster("scancel", job)
    for node in NODES:
        if shared.cluster.daemons[node].poll() is not None:
            shared.cluster.start_node(node)
        for process in shared.cluster.running_on(node):
            with suppress(psutil.NoSuchProcess):
                process.kill()
    shared.cluster.until_idle()


def _kill_stage(stage: Started) -> None:
    """End the stage and all that it has started here, as when its machine is switched off."""
    processes = [psutil.Process(stage.process.pid), *psutil.Process(stage.process.pid).children(recursive=True)]
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def test_two_nodes_end_with_what_two_processes_on_one_machine_end_with(place: Nodes) -> None:
    place.go_on.touch()
    run = place.run("undisturbed")
    stage = place.finish(run)
    assert stage.said(r"Slurm: job \d+ runs on alpha, beta")
    wait_for(lambda: place.nothing_is_left(run))
    assert metrics(run) == place.undisturbed()
    assert "step 8/8" in (run / "training" / "alpha.log").read_text()


def _kill_a_rank(cluster: Cluster) -> None:
    ranks = [
        it
        for it in cluster.running_on("beta")
        if "grpo_core.train" in (command := words(it))
        and "supervise" not in " ".join(command)
        and "ranks" not in " ".join(command)
    ]
    assert len(ranks) == 1
    ranks[0].kill()


def _kill_the_node(cluster: Cluster) -> None:
    cluster.kill_node("beta")


def _freeze_the_node(cluster: Cluster) -> None:
    for process in cluster.running_on("beta"):
        if process.name() != "srun":
            process.suspend()


FAULTS = {
    _kill_a_rank: r"machine beta ended with status 137 \(SIGKILL\)",
    _freeze_the_node: "machine beta ended with status 254: the connection to it is lost",
    _kill_the_node: r"machine (alpha|beta) ended with",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__.strip("_"))
def test_a_fault_is_survived_with_the_undisturbed_metrics(place: Nodes, fault: Callable[[Cluster], None]) -> None:
    run = place.run(fault.__name__.strip("_"), max_restarts=1)
    with standing_still(place, place.start(run)) as stage:
        fault(place.cluster)
        place.go_on.touch()
        stage.until(rf"restart 1 of 1 \(train.max_restarts\): (.|\n)*{FAULTS[fault]}")
        if place.cluster.daemons["beta"].poll() is not None:
            stage.until(r"Slurm: job \d+ is waiting")
            place.cluster.start_node("beta")
        assert stage.end() == 0, stage.text
    assert metrics(run) == place.undisturbed()
    wait_for(lambda: place.nothing_is_left(run))


def _send_sigterm(cluster: Cluster) -> None:
    [job] = cluster.jobs()
    cluster("scancel", "--signal=TERM", job)


def _preempt(cluster: Cluster) -> None:
    cluster.occupy(5)


def _reach_the_time_limit(cluster: Cluster) -> None:
    [job] = cluster.jobs()
    cluster("scontrol", "update", f"JobId={job}", "TimeLimit=1")


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (_send_sigterm, "ended with status 143"),
        (_preempt, r"Slurm ended job \d+ \(.*pre-empted\)"),
        (_reach_the_time_limit, r"Slurm ended job \d+ \(TIMEOUT, TimeLimit\)"),
    ],
    ids=["sigterm", "preempted", "time_limit"],
)
def test_a_pre_empted_training_saves_and_comes_back_by_itself(
    place: Nodes, how: Callable[[Cluster], None], said: str
) -> None:
    run = place.run(how.__name__.strip("_"), save_steps=100)
    with standing_still(place, place.start(run)) as stage:
        how(place.cluster)
        stage.until("told to stop, the checkpoint of step 3")
        place.go_on.touch()
        stage.until(rf"the machines were taken away; going on from step 3 on other ones: .*{said}")
        assert stage.end() == 0, stage.text
    assert resumed_at_step(run) == 3
    assert metrics(run) == place.undisturbed()
    wait_for(lambda: place.nothing_is_left(run))


def test_a_pipeline_trains_and_evaluates_a_sharded_model_as_jobs(place: Nodes) -> None:
    place.go_on.touch()
    write_data(place.folder)
    run, storage = place.run("pipeline"), place.folder / "storage"
    environment = {**place.environment, "GRPO_STORAGE": str(storage)}
    command = Started(environment, "flows.cli.main", "run", run / "config.toml")
    assert command.end() == 0, command.text
    assert len(set(re.findall(r"Slurm: job (\d+) runs on alpha, beta", command.text))) == 2
    run = storage / "runs" / "test"
    assert metrics(run) == place.undisturbed()
    assert (run / "evaluation" / "report.json").exists()
    wait_for(lambda: place.nothing_is_left(run))


def test_a_node_of_the_job_serves_the_model_and_the_server_is_restarted_there(place: Nodes) -> None:
    model = make_model(place.folder / "packed", tie_word_embeddings=True, initializer_range=0.1, **PACKED)
    keys = {"engine": "vllm-server", "max_steps": 5, "save_steps": 1, "vllm_server_timeout": 600.0}
    values = {**config_values(model, place.folder, **keys), "rewards": place.values["rewards"]}
    local = make_run(place.folder / "served-here", values)
    run = place.folder / "served"
    shutil.copytree(local, run)
    values["launch"] = JOB
    (run / "config.toml").write_text(dump_config(parse_config(values)))
    stage = place.start(run)
    try:
        stage.until("stuck")
        serving = [it for it in place.cluster.running_on("beta") if "openai.api_server" in " ".join(words(it))]
        next(it for it in serving if it.parent() not in serving).kill()
        stage.until(r"beta: the vLLM server ended with status 137 \(SIGKILL\) and is started again")
        place.go_on.touch()
        assert stage.end() == 0, stage.text
    finally:
        stage.process.kill()
        stage.process.wait()
    wait_for(lambda: place.nothing_is_left(run))
    assert [*(run / "training").glob("vllm-server-0-beta.log")]
    place.finish(local)
    assert metrics(run) == metrics(local)


def test_a_job_that_a_person_cancels_ends_the_stage(place: Nodes) -> None:
    run = place.run("scancel", max_restarts=3)
    with standing_still(place, place.start(run)) as stage:
        [job] = place.cluster.jobs()
        place.cluster("scancel", job)
        assert stage.end() == 1
        assert stage.said(f"somebody cancelled job {job} in Slurm") and not stage.said("restart 1"), stage.text
        assert stage.said("told to stop, the checkpoint of step 3")
    assert place.nothing_is_left(run)


def test_a_cancelled_stage_leaves_no_job_and_no_process(place: Nodes) -> None:
    run = place.run("cancelled", save_steps=100)
    place.cancel(run)
    assert place.nothing_is_left(run)


def test_a_stage_that_is_killed_leaves_no_job_and_no_process(place: Nodes) -> None:
    run = place.run("killed")
    with standing_still(place, place.start(run)) as stage:
        _kill_stage(stage)
        wait_for(lambda: not place.cluster.jobs(), SILENT_SECONDS)
    assert not [process for node in NODES for process in place.cluster.running_on(node)]
    place.go_on.touch()
    place.finish(run)
    assert metrics(run) == place.undisturbed()
    assert place.nothing_is_left(run)


def test_a_waiting_job_is_said_with_its_reason_and_cancelled_with_the_stage(place: Nodes) -> None:
    place.cluster.occupy(600)
    run = place.run("waiting")
    stage = place.start(run)
    try:
        stage.until(r"Slurm: job \d+ is waiting \(PENDING, (Resources|Priority)\)")
        stage.process.send_signal(signal.SIGINT)
        assert stage.end() != 0
    finally:
        stage.process.kill()
    assert len(place.cluster.jobs()) == 1
    assert not [*(run / "training").glob(".machines-*")]


def test_a_waiting_job_whose_stage_is_killed_ends_once_it_runs(place: Nodes) -> None:
    occupied = place.cluster.occupy(600)
    stage = place.start(place.run("orphan"))
    stage.until(r"Slurm: job \d+ is waiting")
    _kill_stage(stage)
    stage.end()
    assert len(place.cluster.jobs()) == 2
    place.cluster("scancel", occupied)
    wait_for(lambda: not place.cluster.jobs(), SILENT_SECONDS)
    assert not [process for node in NODES for process in place.cluster.running_on(node)]
