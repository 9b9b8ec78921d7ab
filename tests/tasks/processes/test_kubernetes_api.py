"""What is asked of Kubernetes' API server, and what it refuses."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import yaml

from tasks.processes.launchers import kubernetes
from tasks.processes.launchers.batch import Job, SchedulerError
from tasks.processes.launchers.kubernetes import cancel, look, submit
from tests.tasks.processes.test_kubernetes import COMMAND, SHIPPED, kubernetes_config


class Api(ThreadingHTTPServer):
    """An API server with at most one Job, which writes down what it is asked."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.calls: set[tuple[str, str, str]] = set()
        self.queries: list[dict[str, list[str]]] = []
        self.job: dict[str, Any] | None = None
        self.pods: list[dict[str, Any]] = []
        self.refusal: tuple[int, str] | None = None


class Handler(BaseHTTPRequestHandler):
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

    def log_message(self, *_: object) -> None:
        pass


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
