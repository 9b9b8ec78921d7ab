"""Pods are asked for as the user's template and Kubernetes' rules say, with the rights of the shipped role alone; and
what the API server is asked, and refuses."""

from __future__ import annotations

import copy
import json
import re
import sys
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from grpo_core.config.files import parse_config
from grpo_core.config.run import RunConfig
from grpo_core.errors import ConfigError
from tasks.processes.launchers import kubernetes
from tasks.processes.launchers.batch import Job, SchedulerError
from tasks.processes.launchers.kubernetes import cancel, describe, look, object_to_look_up, submit
from tasks.processes.launchers.kubernetes_job import STOP_SECONDS, MissingClientError, job_name, make_job, read_template
from tests.conftest import config_values
from tests.web import Quiet

SHIPPED = Path(__file__).parents[3] / "docs" / "how-to" / "kubernetes"
TEMPLATE = yaml.safe_load((SHIPPED / "training.yaml").read_text())
COMMAND = ["env", "PYTHONSAFEPATH=1", "/venv/bin/python", "-m", "tasks.processes.scheduled", "/storage/it's $HOME"]


def kubernetes_config(template: Path = SHIPPED / "training.yaml") -> RunConfig:
    values = config_values(Path("model"), Path("data"), num_processes=16, num_machines=2)
    return parse_config(values | {"launch": {"launcher": "kubernetes", "kubernetes": str(template)}})


@pytest.mark.slow
def test_a_job_is_the_template_with_one_pod_per_machine_that_is_never_replaced() -> None:
    from kubernetes.client import V1Job, V1PodTemplateSpec

    template = read_template(str(SHIPPED / "training.yaml"))
    job = make_job(template, "grpo-a-1", COMMAND, 2, None)
    V1Job.model_validate(job)
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert (spec["completions"], spec["parallelism"], spec["completionMode"]) == (2, 2, "Indexed")
    assert (spec["backoffLimitPerIndex"], pod["restartPolicy"]) == (0, "Never")
    assert spec["podFailurePolicy"]["rules"][0]["action"] == "FailJob"
    assert "activeDeadlineSeconds" not in spec
    [container] = pod["containers"]
    assert container.pop("command") == COMMAND
    assert container.pop("workingDir") == str(Path.cwd())
    assert container.pop("terminationMessagePolicy") == "FallbackToLogsOnError"
    assert pod.pop("terminationGracePeriodSeconds") == STOP_SECONDS
    assert pod.pop("restartPolicy") == "Never"
    assert V1PodTemplateSpec.model_validate({"spec": pod}) == V1PodTemplateSpec.model_validate(
        {"spec": template["spec"]["template"]["spec"]}
    )
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "8"  # a quantity is text


def test_the_shipped_template_gives_a_pod_the_storage_of_the_work_pool() -> None:
    pool = yaml.safe_load((SHIPPED.parent / "work-pools" / "kubernetes.yaml").read_text())
    pod = TEMPLATE["spec"]["template"]["spec"]
    [storage] = [it for it in pod["volumes"] if it["name"] == "storage"]
    variables = pool["definitions"]["variables"]
    assert storage["persistentVolumeClaim"]["claimName"] == variables["storage_claim"]
    assert {"name": "storage", "mountPath": variables["env"]["GRPO_STORAGE"]} in pod["containers"][0]["volumeMounts"]


def _with(place: str, value: Any) -> Any:
    """The shipped template with a value at spec.template.spec.containers.0.image, for instance."""
    template = copy.deepcopy(TEMPLATE)
    *parents, last = (int(key) if key.isdecimal() else key for key in place.split("."))
    part: Any = template
    for key in parents:
        part = part[key]
    part[last] = value
    return template


POD = "spec.template.spec"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "No such file"),
        ("a: [", "is not a YAML file"),
        ([], "one Job is expected"),
        (["a"], "one Job is expected"),
        (_with("kind", "Pod"), "one Job is expected"),
        (_with("metadata.name", "mine"), r"metadata\.name is set by the launcher; remove it"),
        (_with("spec.completions", 2), "spec may hold `template` only"),
        (_with("spec.backoffLimit", 6), "spec may hold `template` only"),
        (_with("spec", None), "spec may hold `template` only"),
        (_with(f"{POD}.restartPolicy", "OnFailure"), rf"{POD}\.restartPolicy is set by the launcher"),
        (_with(f"{POD}.terminationGracePeriodSeconds", 5), "terminationGracePeriodSeconds is set by the launcher"),
        (_with(f"{POD}.activeDeadlineSeconds", 5), "activeDeadlineSeconds is set by the launcher"),
        (_with(f"{POD}.containers.0.command", ["sh"]), rf"{POD}\.containers\.0\.command is set by the launcher"),
        (_with(f"{POD}.containers.0.image", None), "image is missing"),
        (_with(f"{POD}.containers.0.imagee", "x"), "imagee: Extra inputs are not permitted"),
        (_with(f"{POD}.containers", [{"name": "a"}, {"name": "b"}]), "has 2 containers, but the training is one"),
        (_with(f"{POD}.tolerations", "all"), "tolerations: Input should be a valid list"),
    ],
)
def test_a_template_that_makes_no_training_is_refused_by_the_plan(template: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    if template is not None:
        path.write_text(template if isinstance(template, str) else yaml.safe_dump(template))
    with pytest.raises(ConfigError, match=rf"launch\.kubernetes=.*{message}"):
        read_template(str(path))


def test_a_missing_client_is_named_with_the_extra_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    monkeypatch.setitem(sys.modules, "kubernetes.client", None)
    with pytest.raises(MissingClientError, match=r"pip install -e '\.\[kubernetes\]'"):
        read_template(kubernetes_config().launch.kubernetes)


@given(st.text("aZ0._-", max_size=199).map(lambda rest: f"R{rest}"))
def test_a_job_s_name_is_one_that_kubernetes_takes_for_its_pods_too(run: str) -> None:
    name = job_name(run, "0a1b2c3d")
    assert name.endswith("-0a1b2c3d")
    assert re.fullmatch("[a-z]([-a-z0-9]*[a-z0-9])?", name)  # RFC 1035
    assert len(f"{name}-99999-abcde") <= 63


def _job(*conditions: dict[str, str], **metadata: str) -> dict[str, Any]:
    true = [{"status": "True", **condition} for condition in conditions]
    return {"metadata": {"name": "grpo-a", **metadata}, "spec": {"completions": 2}, "status": {"conditions": true}}


def _pod(number: int, phase: str, **status: Any) -> dict[str, Any]:
    return {"metadata": {"name": f"grpo-a-{number}"}, "status": {"phase": phase, **status}}


def _container(**state: Any) -> dict[str, Any]:
    return {"containerStatuses": [{"name": "training", "state": state}]}


UNSCHEDULABLE = {
    "type": "PodScheduled",
    "status": "False",
    "reason": "Unschedulable",
    "message": "0/3 nodes are available: 3 Insufficient nvidia.com/gpu.",
}
PREEMPTED = {
    "type": "DisruptionTarget",
    "status": "True",
    "reason": "PreemptionByScheduler",
    "message": "default-scheduler: preempting to accommodate a higher priority pod",
}
FAILED = {"type": "Failed", "reason": "FailedIndexes", "message": "Job has failed indexes"}
BY_POLICY = {"type": "Failed", "reason": "PodFailurePolicy", "message": "Pod a/b has condition DisruptionTarget"}
OUT_OF_MEMORY = _container(terminated={"exitCode": 137, "reason": "OOMKilled"})
CRASHED = _container(terminated={"exitCode": 1, "reason": "Error", "message": "No module named 'tasks'\n"})
TOLD_TO_END = _container(terminated={"exitCode": 143, "reason": "Error"})
CREATING = _container(waiting={"reason": "ContainerCreating"})
BOTH_WAIT = Job("waiting", f"grpo-a-0, grpo-a-1: Unschedulable: {UNSCHEDULABLE['message']}")
EVICTED = {"reason": "Evicted", "message": "The node was low on resource: memory."}


# States as the API's reference and the pages on Jobs, pods' life cycle and disruptions describe them.
@pytest.mark.parametrize(
    ("job", "pods", "expected"),
    [
        (_job({"type": "Suspended"}), [], Job("waiting", "suspended, until its queue admits it")),
        (_job(), [_pod(number, "Pending", conditions=[UNSCHEDULABLE]) for number in (0, 1)], BOTH_WAIT),
        (
            _job(),
            [
                _pod(0, "Running", **_container(running={})),
                _pod(1, "Pending", **_container(waiting={"reason": "ImagePullBackOff", "message": "no such image"})),
            ],
            Job("waiting", "grpo-a-1: ImagePullBackOff: no such image"),
        ),
        (_job(), [_pod(0, "Running"), _pod(1, "Running")], Job("running")),
        (
            _job(),
            [_pod(0, "Running"), _pod(1, "Running", conditions=[PREEMPTED])],
            Job("running", f"grpo-a-1: PreemptionByScheduler: {PREEMPTED['message']}"),
        ),
        (
            _job(),
            [_pod(0, "Failed", **CRASHED), _pod(1, "Pending", conditions=[UNSCHEDULABLE])],
            Job(
                "running",
                "grpo-a-0: container training ended with status 1: No module named 'tasks'; "
                f"grpo-a-1: Unschedulable: {UNSCHEDULABLE['message']}",
            ),
        ),
        (_job({"type": "Complete"}), [_pod(0, "Succeeded"), _pod(1, "Succeeded")], Job("ended", "its pods have ended")),
        (
            _job(FAILED),
            [_pod(0, "Succeeded"), _pod(1, "Failed", **CRASHED)],
            Job("ended", "grpo-a-1: container training ended with status 1: No module named 'tasks'"),
        ),
        (_job(FAILED), [_pod(0, "Running"), _pod(1, "Failed")], Job("running")),
        (
            _job(FAILED),
            [_pod(0, "Succeeded"), _pod(1, "Failed", **OUT_OF_MEMORY)],
            Job("ended", "grpo-a-1: container training was killed for memory (OOMKilled)", "scheduler"),
        ),
        (
            _job(FAILED),
            [_pod(1, "Failed", **EVICTED)],
            Job("ended", f"grpo-a-1: Evicted: {EVICTED['message']}", "scheduler"),
        ),
        (_job(BY_POLICY), [_pod(0, "Failed", **TOLD_TO_END)], Job("ended", BY_POLICY["message"], "scheduler")),
        (_job(deletionTimestamp="2026-01-01T00:00:00Z"), [_pod(0, "Running")], Job("running", "it is being deleted")),
    ],
)
def test_the_state_of_a_job_is_said_with_kubernetes_reason(
    job: dict[str, Any], pods: list[dict[str, Any]], expected: Job
) -> None:
    assert describe(job, pods, []) == expected
    assert object_to_look_up(job, pods) is None


@pytest.mark.parametrize(
    ("pods", "event", "said"),
    [
        ([], "exceeded quota: gpus", ""),
        ([_pod(0, "Running")], "exceeded quota: gpus", ""),
        (
            [_pod(0, "Pending", conditions=[UNSCHEDULABLE])],
            "exceeded quota: gpus",
            f"grpo-a-0: Unschedulable: {UNSCHEDULABLE['message']}; ",
        ),
        ([_pod(number, "Pending", **CREATING) for number in (0, 1)], "MountVolume.SetUp failed", ""),
    ],
)
def test_a_job_that_waits_without_a_reason_of_its_pods_is_said_with_its_events(
    pods: list[dict[str, Any]], event: str, said: str
) -> None:
    assert describe(_job(), pods, [event]) == Job("waiting", f"{said}{event}")
    assert object_to_look_up(_job(), pods) is not None


class Api(ThreadingHTTPServer):
    """An API server with at most one Job, which writes down what it is asked."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.calls: set[tuple[str, str, str]] = set()
        self.queries: list[dict[str, list[str]]] = []
        self.job: dict[str, Any] | None = None
        self.pods: list[dict[str, Any]] = []
        self.refusal: tuple[int, str] | None = None


class Handler(Quiet):
    server: Api

    def _answer(self, verb: str) -> None:
        address = urlsplit(self.path)
        found = re.fullmatch(r"/apis?/(?:(batch)/)?v1/namespaces/training/(\w+)(?:/([^/]+))?", address.path)
        assert found, self.path
        group, resource, name = found[1] or "", found[2], found[3]
        verb = "list" if verb == "get" and not name else verb
        self.server.calls.add((group, resource, verb))
        self.server.queries.append(parse_qs(address.query))
        given = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "null")
        things = {"jobs": [self.server.job] if self.server.job else [], "pods": self.server.pods, "events": []}[
            resource
        ]
        named = [it for it in things if it["metadata"]["name"] == name]
        status, answer = 200, {"items": things} if verb == "list" else next(iter(named), None)
        if verb == "create":
            status, answer, self.server.job = 201, given, given
        if self.server.refusal:
            status, answer = self.server.refusal[0], {"kind": "Status", "message": self.server.refusal[1]}
        elif answer is None:
            status, answer = 404, {"kind": "Status", "message": f"{resource} {name!r} not found"}
        elif verb == "delete":
            self.server.job = None
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def do_GET(self) -> None:
        self._answer("get")

    def do_POST(self) -> None:
        self._answer("create")

    def do_DELETE(self) -> None:
        self._answer("delete")


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Api]:
    with Api() as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        config = tmp_path / "kubeconfig"
        config.write_text(
            yaml.safe_dump(
                {
                    "clusters": [{"name": "it", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}],
                    "users": [{"name": "it", "user": {"token": "secret"}}],
                    "contexts": [{"name": "it", "context": {"cluster": "it", "user": "it", "namespace": "training"}}],
                    "current-context": "it",
                }
            )
        )
        monkeypatch.setenv("KUBECONFIG", str(config))
        yield server
        server.shutdown()


@pytest.mark.slow
def test_the_shipped_role_allows_what_is_asked_and_nothing_else(
    api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    *_, client = (kubernetes._connect()[0],)
    monkeypatch.setattr(kubernetes, "_connect", lambda: (client, "training", True))
    monkeypatch.setattr("socket.gethostname", lambda: "stage-xyz")
    api.pods = [{"metadata": {"name": "stage-xyz", "uid": "1-2"}, "status": {"phase": "Pending"}}]
    job = submit(kubernetes_config(), COMMAND, tmp_path / ".machines-0a1b2c3d")
    assert api.job and job == f"training/{api.job['metadata']['name']}"
    assert api.job["metadata"]["ownerReferences"] == [
        {"apiVersion": "v1", "kind": "Pod", "name": "stage-xyz", "uid": "1-2"}
    ]
    assert look(job).state == "waiting"
    cancel(job)
    assert look(job) == Job("ended", "it was deleted", "person")
    cancel(job)
    assert {"propagationPolicy": ["Foreground"]} in api.queries
    assert {"fieldValidation": ["Strict"]} in api.queries
    _, role, binding = yaml.safe_load_all((SHIPPED / "role.yaml").read_text())
    allowed = {
        (group, resource, verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    assert api.calls == allowed
    assert binding["roleRef"]["name"] == role["metadata"]["name"]


@pytest.mark.slow
def test_what_kubernetes_refuses_is_said_in_its_words(api: Api, tmp_path: Path) -> None:
    api.refusal = (403, 'jobs.batch is forbidden: User "a" cannot create resource "jobs"')
    with pytest.raises(SchedulerError, match=r"Kubernetes refuses: jobs\.batch is forbidden: User"):
        submit(kubernetes_config(), COMMAND, tmp_path)
    for ask in (look, cancel):
        with pytest.raises(SchedulerError, match="cannot create resource"):
            ask("training/grpo-a")


@pytest.mark.slow
def test_an_api_server_that_is_away_is_no_ended_job(api: Api) -> None:
    api.server_close()
    with pytest.raises(SchedulerError, match="Kubernetes does not answer"):
        look("training/grpo-a")


def test_a_stage_without_a_cluster_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "missing"))
    with pytest.raises(SchedulerError, match=r"finds no cluster: .*set KUBECONFIG"):
        look("training/grpo-a")
