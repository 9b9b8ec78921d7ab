"""A training sharded over two pods of a real Job, with the shipped role: whatever happens to them, it goes on or says
why, and leaves nothing. Nodes are pretended (`tests.e2e.cluster`)."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from kubernetes import client

from grpo_core.config.files import load_config
from tasks.processes.launchers import kubernetes
from tasks.processes.launchers.kubernetes import cancel, look, submit
from tests.e2e.cluster import Cluster, Node, control_plane
from tests.e2e.place import PROJECT, SECONDS, Place, Started, metrics, resumed_at_step, standing_still
from tests.processes import wait_for, words

pytestmark = pytest.mark.e2e

SHIPPED = PROJECT / "docs" / "how-to" / "kubernetes"
NAMESPACE = "training"
LIMIT_SECONDS = 150.0  # in which pods have ended once they are on their own
SCENE = """
{apiVersion: v1, kind: Namespace, metadata: {name: training}}
---
apiVersion: v1
kind: PersistentVolume
metadata: {name: shared}
spec:
  accessModes: [ReadWriteMany]
  capacity: {storage: 1Ti}
  hostPath: {path: /}
  claimRef: {namespace: training, name: grpo-storage}
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: grpo-storage, namespace: training, annotations: {pv.kubernetes.io/bind-completed: "yes"}}
spec:
  accessModes: [ReadWriteMany]
  resources: {requests: {storage: 1Ti}}
  storageClassName: ""
  volumeName: shared
---
apiVersion: scheduling.k8s.io/v1
kind: PriorityClass
metadata: {name: urgent}
value: 1000
"""
URGENT = """
apiVersion: v1
kind: Pod
metadata: {name: urgent, namespace: training}
spec:
  priorityClassName: urgent
  containers:
    - {name: it, image: it, command: [sleep, "600"], resources: {limits: {nvidia.com/gpu: 8}}}
"""
QUOTA = """
apiVersion: v1
kind: ResourceQuota
metadata: {name: gpus, namespace: training}
spec: {hard: {requests.nvidia.com/gpu: 16}} # the stage has 8
"""


class Pods(Place):
    machines = (r"grpo-.*-0", r"grpo-.*-1")

    def __init__(self, folder: Path, model: Path, cluster: Cluster):
        self.cluster, self.nodes = cluster, dict[str, Node]()
        cluster.make(SCENE)
        cluster.make((SHIPPED / "role.yaml").read_text())
        account = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/grpo-train/token"
        token = cluster.ask("POST", account, {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest"})
        self.kubeconfig = cluster.kubeconfig("stage", token["status"]["token"])
        launch = {"launcher": "kubernetes", "kubernetes": str(SHIPPED / "training.yaml")}
        super().__init__(folder, model, {**os.environ, "KUBECONFIG": str(self.kubeconfig)}, launch)

    def node(self, name: str) -> Node:
        """The node of this name, which is made if there is none."""
        if name not in self.nodes:
            self.nodes[name] = Node(self.cluster, name)
        return self.nodes[name]

    def remove_node(self, name: str) -> None:
        if name in self.nodes:
            self.nodes.pop(name).end()
            self.cluster.ask("DELETE", f"/api/v1/nodes/{name}")

    def pods(self) -> list[dict[str, Any]]:
        """Those that have not ended."""
        return [it for it in self.cluster.pods(NAMESPACE) if it["status"]["phase"] in ("Pending", "Running")]

    def until_ended(self, seconds: float = LIMIT_SECONDS) -> None:
        """Until no pod of the cluster runs or waits, and none of their processes is left."""
        wait_for(lambda: not self.pods() and not any(node.processes() for node in self.nodes.values()), seconds)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Iterator[Pods]:
    folder = tmp_path_factory.mktemp("kubernetes")
    with control_plane(folder) as cluster:
        place = Pods(folder, model_folder, cluster)
        yield place
        for name in [*place.nodes]:
            place.remove_node(name)


@pytest.fixture
def place(shared: Pods) -> Iterator[Pods]:
    shared.go_on.unlink(missing_ok=True)
    yield shared
    for kind in ("resourcequotas", "pods"):
        shared.cluster.ask("DELETE", f"/api/v1/namespaces/{NAMESPACE}/{kind}", {"gracePeriodSeconds": 0})
    options = {"propagationPolicy": "Background"}
    shared.cluster.ask("DELETE", f"/apis/batch/v1/namespaces/{NAMESPACE}/jobs", options)
    for node in shared.nodes.values():
        for process in node.processes():
            process.kill()
    wait_for(lambda: not shared.cluster.pods(NAMESPACE), 60)


@contextmanager
def both_still(place: Pods, stage: Started) -> Iterator[Started]:
    """A training on two nodes of which every process stands still in its fourth rollout."""
    place.node("a"), place.node("b")
    with standing_still(place, stage):
        yield stage


def test_two_pods_end_with_what_two_processes_on_one_machine_end_with_once_there_is_a_second_node(place: Pods) -> None:
    place.go_on.touch()
    run = place.run("undisturbed")
    place.node("a")
    place.remove_node("b")
    stage = place.start(run)
    stage.until(r"Kubernetes: job training/grpo-test-\w+ is waiting \(.*Unschedulable: 0/1 nodes .* nvidia.com/gpu")
    place.node("b")
    assert stage.end() == 0, stage.text
    place.until_ended()
    assert metrics(run) == place.undisturbed()
    assert len([*(run / "training").glob("grpo-test-*.log")]) == 2
    assert not [*(run / "training").glob(".machines-*")]
    [job] = place.cluster.jobs(NAMESPACE)
    assert job["status"]["succeeded"] == 2 and job["spec"]["ttlSecondsAfterFinished"] == 3600


def _kill_a_rank(node: Node) -> None:
    ranks = [it for it in node.processes() if "grpo_core.train" in words(it)]
    [rank] = [it for it in ranks if "tasks.processes.ranks" not in words(it)]
    rank.kill()


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (_kill_a_rank, r"\(train.max_restarts\), .*: machine grpo-test-\S+ ended with status 137 \(SIGKILL\)"),
        (Node.kill_for_memory, r".*Kubernetes ended job .*training was killed for memory \(OOMKilled\)"),
    ],
    ids=["killed-process", "out-of-memory"],
)
def test_a_process_or_a_pod_that_is_killed_is_named_and_survived(
    place: Pods, fault: Callable[[Node], None], said: str
) -> None:
    run = place.run(fault.__name__.strip("_"), max_restarts=1)
    with both_still(place, place.start(run)) as stage:
        fault(place.node("b"))
        place.go_on.touch()
        stage.until(rf"restart 1 of 1 {said}")
        assert stage.end() == 0, stage.text
    assert metrics(run) == place.undisturbed()
    place.until_ended()


def test_a_node_that_is_gone_is_survived_on_another(place: Pods) -> None:
    run = place.run("gone-node", max_restarts=1)
    with both_still(place, place.start(run)) as stage:
        place.nodes["b"].end()  # the API has its pod as running, for ever
        place.go_on.touch()
        stage.until(r"restart 1 of 1 .*: machine grpo-test-\S+ ended with status 254: the connection to it is lost")
        assert stage.said("was cancelled and has not ended .*; its machines end by themselves")
        place.node("c")
        assert stage.end() == 0, stage.text
    assert metrics(run) == place.undisturbed()
    place.remove_node("b")
    for pod in place.pods():
        assert "deletionTimestamp" in pod["metadata"]
        path = f"/api/v1/namespaces/{NAMESPACE}/pods/{pod['metadata']['name']}"
        place.cluster.ask("DELETE", path, {"gracePeriodSeconds": 0})
    place.until_ended()
    place.remove_node("c")


def _evict(place: Pods) -> None:
    name = place.pods()[0]["metadata"]["name"]
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name}}
    place.cluster.ask("POST", f"/api/v1/namespaces/{NAMESPACE}/pods/{name}/eviction", eviction)


def _preempt(place: Pods) -> None:
    place.cluster.make(URGENT)


@pytest.mark.parametrize("take", [_evict, _preempt], ids=["evicted", "preempted"])
def test_a_training_whose_pod_is_taken_saves_and_goes_on_by_itself(place: Pods, take: Callable[[Pods], None]) -> None:
    run = place.run(take.__name__, save_steps=100)  # max_restarts is 0
    with both_still(place, place.start(run)) as stage:
        take(place)
        stage.until(r"told to stop, the checkpoint of step 3")
        place.go_on.touch()
        stage.until(r"the machines were taken away; going on from step 3")
        if take is _preempt:
            stage.until(r"is waiting \(.*Unschedulable")
            place.cluster.ask("DELETE", f"/api/v1/namespaces/{NAMESPACE}/pods/urgent")
        assert stage.end() == 0, stage.text
    assert stage.said("DisruptionTarget"), stage.text
    assert resumed_at_step(run) == 3
    assert metrics(run) == place.undisturbed()
    place.until_ended()


def test_a_cancelled_training_saves_and_ends_in_all_pods_and_goes_on_from_there(place: Pods) -> None:
    run = place.run("cancelled", save_steps=100)
    place.node("a"), place.node("b")
    place.cancel(run)
    assert not place.pods() and not any(node.processes() for node in place.nodes.values())
    place.go_on.touch()
    place.finish(run)
    assert resumed_at_step(run) == 3
    assert metrics(run) == place.undisturbed()


def test_a_training_that_is_cancelled_while_it_waits_leaves_no_job(place: Pods) -> None:
    place.node("a")
    place.remove_node("b")
    stage = place.start(place.run("waiting"))
    stage.until(r"is waiting \(.*Unschedulable")
    stage.process.send_signal(signal.SIGINT)
    assert stage.end() != 0
    assert not place.cluster.jobs(NAMESPACE) and not place.pods()


def test_pods_end_when_their_stage_is_killed(place: Pods, monkeypatch: pytest.MonkeyPatch) -> None:
    run = place.run("killed-stage")
    with both_still(place, place.start(run)) as stage:
        for process in [*psutil.Process(stage.process.pid).children(recursive=True), stage.process]:
            process.kill()
        place.until_ended()
    monkeypatch.setenv("KUBECONFIG", str(place.kubeconfig))
    [job] = place.cluster.jobs(NAMESPACE)
    wait_for(lambda: look(f"{NAMESPACE}/{job['metadata']['name']}").state == "ended", SECONDS)


@pytest.fixture
def stage_pod(place: Pods, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """This process asks as the stage would in the pod of this name."""
    monkeypatch.setenv("KUBECONFIG", str(place.kubeconfig))
    kubernetes._connect()
    monkeypatch.setattr(kubernetes, "_connect", lambda: (client, NAMESPACE, True))
    pod = yaml.safe_load(URGENT)
    pod["metadata"]["name"] = "stage"
    pod["spec"]["nodeName"] = "elsewhere"
    place.cluster.ask("POST", f"/api/v1/namespaces/{NAMESPACE}/pods", pod)
    monkeypatch.setattr("socket.gethostname", lambda: "stage")
    return "stage"


def test_a_job_waits_for_its_quota_and_goes_with_the_pod_of_its_stage(place: Pods, stage_pod: str) -> None:
    place.cluster.make(QUOTA)
    config = load_config(place.run("quota") / "config.toml")
    job = submit(config, ["sleep", "600"], Path(".machines-0a1b2c3d"))
    wait_for(lambda: "exceeded quota: gpus" in look(job).reason, 30)
    assert look(job).state == "waiting"
    pod = f"/api/v1/namespaces/{NAMESPACE}/pods/{stage_pod}"
    place.cluster.ask("DELETE", pod, {"gracePeriodSeconds": 0})
    wait_for(lambda: look(job).state == "ended", 60)
    assert place.cluster.jobs(NAMESPACE) == []
    cancel(job)
