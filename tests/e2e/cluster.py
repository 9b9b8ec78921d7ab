"""A Kubernetes cluster on this machine: real etcd, API server, controllers and scheduler, and nodes that are pretended.

A pretended node stands for a kubelet: it runs the container of each pod that the scheduler gives it as a local process,
first in a process namespace of its own, and says how the pod is. Images, volumes and the pods' network are not there:
all pods have this machine's files and addresses.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tasks.processes.machine import free_port
from tests.processes import runs, wait_for

PROGRAMS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")
CONTROLLERS = ("garbage-collector", "job", "namespace", "resourcequota", "serviceaccount", "ttl-after-finished")
TOKEN = "of-the-administrator"
POLL_SECONDS = 0.2
POD = ["unshare", "--fork", "--pid", "--uts", "--mount-proc", "--kill-child", "sh", "-c"]


class Cluster:
    """An API server, and the administrator's way to it."""

    def __init__(self, folder: Path, url: str):
        from kubernetes import client

        self.folder, self.url, self.certificate = folder, url, folder / "certificates" / "apiserver.crt"
        wait_for(self.certificate.exists, 60)
        configuration = client.Configuration(host=url)
        configuration.ssl_ca_cert = str(self.certificate)
        configuration.api_key["BearerToken"] = f"Bearer {TOKEN}"
        self.client = client.ApiClient(configuration)

    def ask(self, method: str, path: str, body: Any = None, kind: str = "application/json") -> Any:
        """What the API server answers, as JSON; None to what it does not have."""
        from kubernetes.client import ApiException

        headers = {"Accept": "application/json", "Content-Type": kind, "Authorization": f"Bearer {TOKEN}"}
        try:
            response = self.client.rest_client.request(method, self.url + path, headers=headers, body=body)
            answer = json.loads(response.response.data)
            if not 200 <= response.status <= 299:
                raise ApiException(status=response.status, reason=answer.get("message"))
            return answer
        except ApiException as error:
            if error.status == 404:
                return None
            raise

    def make(self, text: str) -> None:
        """Create each object of a YAML text."""
        for each in yaml.safe_load_all(text):
            group = "api" if "/" not in each["apiVersion"] else "apis"
            namespace = each["metadata"].get("namespace")
            place = f"/{group}/{each['apiVersion']}" + f"/namespaces/{namespace}" * bool(namespace)
            kind = each["kind"].lower()
            plural = f"{kind[:-1]}ies" if kind.endswith("y") else f"{kind}{'e' * kind.endswith('s')}s"
            self.ask("POST", f"{place}/{plural}", each)

    def pods(self, namespace: str = "default") -> list[dict[str, Any]]:
        return list(self.ask("GET", f"/api/v1/namespaces/{namespace}/pods")["items"])

    def jobs(self, namespace: str = "default") -> list[dict[str, Any]]:
        return list(self.ask("GET", f"/apis/batch/v1/namespaces/{namespace}/jobs")["items"])

    def kubeconfig(self, name: str, token: str, namespace: str = "default") -> Path:
        """A kubeconfig that gives access by the token."""
        path = self.folder / f"{name}.kubeconfig"
        cluster = {"server": self.url, "certificate-authority": str(self.certificate)}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "here", "cluster": cluster}],
            "users": [{"name": name, "user": {"token": token}}],
            "contexts": [{"name": "here", "context": {"cluster": "here", "user": name, "namespace": namespace}}],
            "current-context": "here",
        }
        path.write_text(yaml.safe_dump(config))
        return path


@contextmanager
def control_plane(folder: Path) -> Iterator[Cluster]:
    """A cluster without nodes. Skips where its programs are not found."""
    search = os.pathsep.join([os.environ.get("KUBEBUILDER_ASSETS", ""), os.environ["PATH"]])
    found = {name: shutil.which(name, path=search) for name in PROGRAMS}
    if missing := [name for name, path in found.items() if not path]:
        pytest.skip(f"a cluster needs {', '.join(missing)} in the folder KUBEBUILDER_ASSETS or on PATH")
    if os.geteuid() or not shutil.which("unshare"):
        pytest.skip("pods as process namespaces need root, and util-linux")
    etcd, peer, port = (f"http://127.0.0.1:{free_port()}" for _ in range(3))
    url = port.replace("http", "https")
    key, tokens = folder / "service-account.key", folder / "tokens.csv"
    subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True)
    tokens.write_text(f"{TOKEN},administrator,1,system:masters\n")
    with ExitStack() as stack:
        log = stack.enter_context((folder / "control-plane.log").open("w"))

        def start(name: str, *arguments: str) -> None:
            process = subprocess.Popen([str(found[name]), *arguments], stdout=log, stderr=log)
            stack.callback(process.wait)
            stack.callback(process.kill)

        start(
            "etcd",
            f"--data-dir={folder / 'etcd'}",
            f"--listen-client-urls={etcd}",
            f"--advertise-client-urls={etcd}",
            f"--listen-peer-urls={peer}",
            "--unsafe-no-fsync",
        )
        start(
            "kube-apiserver",
            f"--etcd-servers={etcd}",
            "--bind-address=127.0.0.1",
            f"--secure-port={url.rpartition(':')[2]}",
            f"--cert-dir={folder / 'certificates'}",
            f"--token-auth-file={tokens}",
            "--authorization-mode=RBAC",
            "--disable-admission-plugins=ServiceAccount",  # it would mount a token into each pod
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={key}",
            f"--service-account-signing-key-file={key}",
            "--service-cluster-ip-range=10.0.0.0/24",
        )
        cluster = Cluster(folder, url)
        config = cluster.kubeconfig("administrator", TOKEN)
        wait_for(lambda: _answers(cluster), 60)
        start(
            "kube-controller-manager",
            f"--kubeconfig={config}",
            "--leader-elect=false",
            "--secure-port=0",
            f"--controllers={','.join(f'{name}-controller' for name in CONTROLLERS)}",
        )
        start("kube-scheduler", f"--kubeconfig={config}", "--leader-elect=false", "--secure-port=0")
        yield cluster


def _answers(cluster: Cluster) -> bool:
    with suppress(Exception):
        return cluster.ask("GET", "/api/v1/namespaces/default") is not None
    return False


class Node(threading.Thread):
    """A pretended node with eight pretended GPUs."""

    def __init__(self, cluster: Cluster, name: str):
        super().__init__(daemon=True)
        self.cluster, self.node = cluster, name
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.ending: dict[str, float] = {}  # when a pod is killed that was told to stop
        self.out_of_memory: set[str] = set()  # pods whose memory the node pretends to have been exceeded
        self.stopped = threading.Event()
        quantities = {"cpu": "64", "memory": "1Ti", "nvidia.com/gpu": "8", "pods": "20"}
        status = {
            "capacity": quantities,
            "allocatable": quantities,
            "conditions": [{"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "pretended"}],
        }
        node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}}
        cluster.ask("POST", "/api/v1/nodes", node)
        self._patch(f"/api/v1/nodes/{name}/status", {"status": status})
        self._patch(f"/api/v1/nodes/{name}", {"spec": {"taints": None}})
        self.start()

    def run(self) -> None:
        while not self.stopped.wait(POLL_SECONDS):
            with suppress(OSError):
                for pod in self.cluster.ask("GET", f"/api/v1/pods?fieldSelector=spec.nodeName%3D{self.node}")["items"]:
                    self._attend(pod)

    def end(self) -> None:
        """Kill what runs here, without a word to the cluster."""
        self.stopped.set()
        self.join()
        for process in self.running.values():
            for first in _first(process):
                first.kill()
            process.kill()
            process.wait()

    def _attend(self, pod: dict[str, Any]) -> None:
        path = f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}"
        uid, phase = pod["metadata"]["uid"], pod["status"]["phase"]
        if uid not in self.running:
            if phase == "Pending" and "deletionTimestamp" not in pod["metadata"]:
                self._start(pod, path)
            elif "deletionTimestamp" in pod["metadata"]:
                self._forget(pod, path)
            return
        process = self.running[uid]
        if (code := process.poll()) is not None:
            if phase == "Running":
                reason = "OOMKilled" if uid in self.out_of_memory else "Error" if code else "Completed"
                state = {"terminated": {"exitCode": code, "reason": reason}}
                self._say(pod, path, "Failed" if code else "Succeeded", state)
            if "deletionTimestamp" in pod["metadata"]:
                self._forget(pod, path)
        elif "deletionTimestamp" in pod["metadata"]:
            if uid not in self.ending:
                self.ending[uid] = time.monotonic() + pod["metadata"]["deletionGracePeriodSeconds"]
                for first in _first(process):
                    first.terminate()
            elif time.monotonic() > self.ending[uid]:
                for first in _first(process):
                    first.kill()

    def _start(self, pod: dict[str, Any], path: str) -> None:
        container = pod["spec"]["containers"][0]
        host = pod["spec"].get("hostname", pod["metadata"]["name"])
        environment = {"PATH": os.environ["PATH"], "HOSTNAME": host}
        for each in container.get("env", []):
            if "value" in each:
                environment[each["name"]] = each["value"]
            else:
                field = each["valueFrom"]["fieldRef"]["fieldPath"]
                kind, _, key = field.removesuffix("']").partition("['")
                environment[each["name"]] = pod["metadata"][kind.removeprefix("metadata.")][key]
        log = self.cluster.folder / f"{pod['metadata']['name']}.log"
        with log.open("w") as output:
            self.running[pod["metadata"]["uid"]] = subprocess.Popen(
                [*POD, 'hostname "$0" && exec "$@"', host, *container["command"]],
                cwd=container.get("workingDir"),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        self._say(pod, path, "Running", {"running": {}})

    def _say(self, pod: dict[str, Any], path: str, phase: str, state: dict[str, Any]) -> None:
        container = pod["spec"]["containers"][0]
        status = {
            "name": container["name"],
            "image": container["image"],
            "imageID": "",
            "restartCount": 0,
            "ready": phase == "Running",
            "state": state,
        }
        self._patch(f"{path}/status", {"status": {"phase": phase, "podIP": "127.0.0.1", "containerStatuses": [status]}})

    def _forget(self, pod: dict[str, Any], path: str) -> None:
        options = {"gracePeriodSeconds": 0, "preconditions": {"uid": pod["metadata"]["uid"]}}
        self.cluster.ask("DELETE", path, options)

    def _patch(self, path: str, body: dict[str, Any]) -> None:
        self.cluster.ask("PATCH", path, body, "application/strategic-merge-patch+json")

    def kill_for_memory(self) -> None:
        """Kill all pods here as the kernel does for memory."""
        for uid, process in self.running.items():
            self.out_of_memory.add(uid)
            for first in _first(process):
                first.kill()

    def processes(self) -> list[psutil.Process]:
        """All that run in the pods here."""
        found = []
        for process in self.running.values():
            with suppress(psutil.NoSuchProcess):
                found += [it for it in psutil.Process(process.pid).children(recursive=True) if runs(it)]
        return found


def _first(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """The first process of a pod: it gets the pod's signals, and all others die with it."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(process.pid).children()
    return []
