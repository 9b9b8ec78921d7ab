"""Machines that are pods in Kubernetes: those of one Indexed Job, which every cluster supports without an extension.

The stage asks the cluster that it runs in, as the service account of its pod. If KUBECONFIG is set, or the stage runs
outside a cluster, it asks the cluster of its kubeconfig. The pods find each other by their own addresses, which they
write into the run directory: no service and no DNS name is needed.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from grpo_core.config.run import RunConfig
from tasks.processes.launchers.batch import Job, Scheduler, SchedulerError, batch
from tasks.processes.launchers.kubernetes_job import MissingClientError, job_name, make_job, read_template

OWN_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
ANSWER_SECONDS = (2.0, 5.0)  # to connect, and to answer: up to three requests have to end within 30 s
LAST_WORDS = 500  # characters of a failed container's last output
POD_STARTS = {"ContainerCreating", "PodInitializing"}


def submit(config: RunConfig, command: list[str], folder: Path) -> str:
    """Create the Job. If the stage runs in a pod, the Job belongs to it: Kubernetes removes it with that pod."""
    api, own_namespace, inside = _connect()
    template = read_template(config.launch.kubernetes)
    namespace = (template.get("metadata") or {}).get("namespace") or own_namespace
    owner = _own_pod(api, namespace) if inside and namespace == own_namespace else None
    name = job_name(config.name, folder.name[-8:])
    job = make_job(template, name, command, config.num_machines, owner)
    _request(api.BatchV1Api().create_namespaced_job, namespace, job, field_validation="Strict")
    return f"{namespace}/{name}"


def look(job: str) -> Job:
    api, _, _ = _connect()
    namespace, name = job.split("/")
    found = _get_or_none(api.BatchV1Api().read_namespaced_job, name, namespace)
    if found is None:
        return Job("ended", "it was deleted", "person")
    selector = f"batch.kubernetes.io/job-name={name}"
    pods = _request(api.CoreV1Api().list_namespaced_pod, namespace, label_selector=selector)["items"]
    events = []
    if puzzle := object_to_look_up(found, pods):
        about = f"involvedObject.name={puzzle},type=Warning"
        events = _request(api.CoreV1Api().list_namespaced_event, namespace, field_selector=about)["items"]
    return describe(found, pods, [event["message"] for event in events])


def cancel(job: str) -> None:
    """Delete the Job. Its pods are told to stop first; it is gone when they are."""
    api, _, _ = _connect()
    namespace, name = job.split("/")
    _get_or_none(api.BatchV1Api().delete_namespaced_job, name, namespace, propagation_policy="Foreground")


def describe(job: dict[str, Any], pods: list[dict[str, Any]], events: list[str]) -> Job:
    """Determine a Job's state from what the API reports of it and its pods, and of events if these don't explain why it
    waits."""
    conditions = _true_conditions(job)
    troubles: dict[str, list[str]] = {}
    for pod in pods:
        if trouble := _pod_problem(pod):
            troubles.setdefault(trouble, []).append(pod["metadata"]["name"])
    reason = "; ".join(f"{', '.join(names)}: {trouble}" for trouble, names in troubles.items())
    phases = [pod["status"].get("phase", "Pending") for pod in pods]
    if {"Complete", "Failed"} & conditions.keys() and not {"Pending", "Running", "Unknown"} & set(phases):
        failed = conditions.get("Failed", {})
        if failed.get("reason") == "PodFailurePolicy":
            return Job("ended", failed["message"], "scheduler")  # the pod that was taken away is no longer listed
        return Job("ended", reason or "its pods have ended", "scheduler" if any(map(_is_evicted, pods)) else "itself")
    if "deletionTimestamp" in job["metadata"]:
        return Job("running", "it is being deleted")
    if "Suspended" in conditions:
        return Job("waiting", "suspended, until its queue admits it")
    ended = {"Succeeded", "Failed"} & set(phases)
    if ended or phases.count("Running") == job["spec"]["completions"]:
        return Job("running", reason)
    return Job("waiting", "; ".join(part for part in [reason, *events[-1:]] if part) or "pods start")


def object_to_look_up(job: dict[str, Any], pods: list[dict[str, Any]]) -> str | None:
    """Name of the object to look up in events: the Job if pods are missing, or a pod that waits for no stated reason;
    else None."""
    if _true_conditions(job) or "deletionTimestamp" in job["metadata"]:
        return None
    if len(pods) < job["spec"]["completions"]:
        return str(job["metadata"]["name"])
    waiting = [pod for pod in pods if pod["status"].get("phase") == "Pending" and not _pod_problem(pod)]
    return str(waiting[0]["metadata"]["name"]) if waiting else None


def _true_conditions(thing: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {it["type"]: it for it in (thing.get("status") or {}).get("conditions") or [] if it["status"] == "True"}


def _pod_problem(pod: dict[str, Any]) -> str:
    """Return why a pod does not run, or will soon stop, in Kubernetes' words; "" if there is no such reason."""
    status = pod["status"]
    containers = [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]
    for container in containers:
        ended, waiting = (container.get("state", {}).get(state) or {} for state in ("terminated", "waiting"))
        if ended.get("reason") == "OOMKilled":
            return f"container {container['name']} was killed for memory (OOMKilled)"
        if _is_evicted(pod):
            break
        if ended.get("exitCode"):
            said = " ".join(ended.get("message", "").split())[-LAST_WORDS:]
            return f"container {container['name']} ended with status {ended['exitCode']}" + f": {said}" * bool(said)
        if waiting and waiting["reason"] not in POD_STARTS:
            return f"{waiting['reason']}: {waiting.get('message', '')}"
    for condition in status.get("conditions") or []:
        disrupted = condition["type"] == "DisruptionTarget" and condition["status"] == "True"
        if disrupted or (condition["type"] == "PodScheduled" and condition["status"] == "False"):
            return f"{condition['reason']}: {condition.get('message', '')}"
    return f"{status['reason']}: {status.get('message', '')}" if status.get("reason") else ""


def _is_evicted(pod: dict[str, Any]) -> bool:
    """True if Kubernetes has ended the pod, or will."""
    containers = pod["status"].get("containerStatuses") or []
    reasons = {pod["status"].get("reason"), *((it["state"].get("terminated") or {}).get("reason") for it in containers)}
    return "DisruptionTarget" in _true_conditions(pod) or bool(reasons & {"Evicted", "OOMKilled"})


def _connect() -> tuple[Any, str, bool]:
    """Set up the client; returns its module, the namespace to use, and whether this process runs in a pod there."""
    try:
        from kubernetes import client, config
    except ImportError:
        raise MissingClientError from None
    try:
        if "KUBERNETES_SERVICE_HOST" in os.environ and "KUBECONFIG" not in os.environ:
            config.load_incluster_config()
            return client, OWN_NAMESPACE.read_text().strip(), True
        file = os.environ.get("KUBECONFIG")
        config.load_kube_config(file)
        _, context = config.list_kube_config_contexts(file)
        return client, context["context"].get("namespace", "default"), False
    except config.ConfigException as error:
        raise SchedulerError(
            f"launch.launcher='kubernetes' finds no cluster: {error}. Run the stage in a pod, or set KUBECONFIG"
        ) from None


def _own_pod(api: Any, namespace: str) -> dict[str, Any] | None:
    """Owner reference to this pod; None if the host name is not the pod's, as in the node's network."""
    pod = _get_or_none(api.CoreV1Api().read_namespaced_pod, socket.gethostname(), namespace)
    if pod is None:
        return None
    return {"apiVersion": "v1", "kind": "Pod", "name": pod["metadata"]["name"], "uid": pod["metadata"]["uid"]}


def _get_or_none(call: Callable[..., Any], *arguments: Any, **options: Any) -> dict[str, Any] | None:
    """Return the API's answer; None if the object does not exist."""
    from kubernetes.client import ApiException

    try:
        return _request(call, *arguments, **options)
    except SchedulerError as error:
        if isinstance(error.__cause__, ApiException) and error.__cause__.status == 404:
            return None
        raise


def _request(call: Callable[..., Any], *arguments: Any, **options: Any) -> dict[str, Any]:
    """Return the API's answer as JSON. Raises SchedulerError if it refuses or does not answer."""
    from kubernetes.client import ApiException
    from urllib3.exceptions import HTTPError

    try:
        answer = call(*arguments, **options, _preload_content=False, _request_timeout=ANSWER_SECONDS)
        return dict(json.loads(answer.data))
    except ApiException as error:
        said = str(error.body or error.reason)
        with suppress(ValueError, KeyError, TypeError):
            said = json.loads(said)["message"]
        raise SchedulerError(f"Kubernetes refuses: {said}") from error
    except HTTPError as error:
        raise SchedulerError(f"Kubernetes does not answer: {error}") from error


kubernetes = batch(Scheduler("Kubernetes", submit, look, cancel))
