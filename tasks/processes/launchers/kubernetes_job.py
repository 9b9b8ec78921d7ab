"""A training's Job in Kubernetes: the user's template, and the fields that the launcher sets. Talks to no cluster."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from grpo_core.errors import ConfigError, GrpoError, install
from grpo_core.system.descendants import KILL_SECONDS
from tasks.processes.run import GRACE_SECONDS

# Room for the index and the longest random part of a pod's name, which is also a host name: 63 characters at most.
LONGEST_NAME = 40
FINISHED_SECONDS = 3600  # for which a Job that has ended is kept, to be looked at
STOP_SECONDS = int(GRACE_SECONDS + KILL_SECONDS) + 10  # in which a pod saves and ends once it is told to
LABELS = {"app.kubernetes.io/managed-by": "grpo-flows"}
# By part of the Job: what a template may not say, since the launcher does.
OURS = {
    ("metadata",): {"name", "generateName", "ownerReferences"},
    ("spec", "template", "spec"): {
        "activeDeadlineSeconds",
        "hostname",
        "restartPolicy",
        "subdomain",
        "terminationGracePeriodSeconds",
    },
    ("spec", "template", "spec", "containers", 0): {"args", "command", "terminationMessagePolicy", "workingDir"},
}
DISRUPTED = {"type": "DisruptionTarget", "status": "True"}


class MissingClientError(GrpoError):
    """Raised if Kubernetes' Python client is not installed."""

    def __init__(self) -> None:
        super().__init__(
            "launch.launcher='kubernetes' needs the Kubernetes client for Python, which is not installed here: "
            f"{install('kubernetes')}"
        )


def read_template(path: str) -> dict[str, Any]:
    """Read the Job in the file, without the launcher's fields. Raises ConfigError if the training's pods cannot be made
    from it, and MissingClientError if the client, which validates Jobs, is not installed."""
    try:
        template = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise ConfigError(f"launch.kubernetes={path!r}: {error.strerror} (looked in {Path.cwd()})") from None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"launch.kubernetes={path!r} is not a YAML file: {error}") from None
    if problem := _problem(template):
        raise ConfigError(f"launch.kubernetes={path!r}: {problem}")
    return dict(template)


def _problem(template: Any) -> str | None:
    """Describe what is wrong with the template, as the end of a sentence; None if nothing is. Turns its quantities into
    text, the API's form."""
    try:
        from kubernetes.client import V1Job
    except ImportError:
        raise MissingClientError from None
    if not isinstance(template, dict) or (template.get("apiVersion"), template.get("kind")) != ("batch/v1", "Job"):
        return "one Job is expected, with apiVersion: batch/v1 and kind: Job"
    try:
        _quantities_as_text(template)
        V1Job.model_validate(template)
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()]
        return "Kubernetes does not take it. " + "; ".join(lines)
    if template.get("status") or set(template.get("spec") or {}) != {"template"}:
        return "spec may hold `template` only, and status nothing: the launcher sets the rest"
    if len(containers := _at(template, ("spec", "template", "spec"))["containers"]) != 1:
        return (
            f"spec.template.spec.containers has {len(containers)} containers, but the training is one; make others "
            "initContainers, with restartPolicy: Always if they should run beside it"
        )
    if not containers[0].get("image"):
        return "spec.template.spec.containers.0.image is missing: an image that holds this project, installed"
    for place, keys in OURS.items():
        if both := sorted(keys & (_at(template, place) or {}).keys()):
            return f"{'.'.join(map(str, (*place, both[0])))} is set by the launcher; remove it"
    return None


def make_job(
    template: dict[str, Any], name: str, command: list[str], machines: int, owner: dict[str, Any] | None
) -> dict[str, Any]:
    """Make the Job: `machines` pods with the indices 0, 1, …, each of which runs the command once.

    A pod that ends by itself is not replaced, and does not end the others: the stage decides what happens then. A pod
    that is pre-empted, evicted or drained ends the Job, which says so. `owner`: the stage's own pod as an owner
    reference; Kubernetes removes the Job when that is removed.
    """
    job = copy.deepcopy(template)
    metadata, spec = job.setdefault("metadata", {}), job["spec"]
    metadata["name"] = name
    metadata["labels"] = {**(metadata.get("labels") or {}), **LABELS}
    if owner:
        metadata["ownerReferences"] = [owner]
    spec |= {
        "completionMode": "Indexed",
        "completions": machines,
        "parallelism": machines,
        "backoffLimitPerIndex": 0,
        "podFailurePolicy": {"rules": [{"action": "FailJob", "onPodConditions": [DISRUPTED]}]},
        "ttlSecondsAfterFinished": FINISHED_SECONDS,
    }
    pod = spec["template"].setdefault("metadata", {})
    pod["labels"] = {**(pod.get("labels") or {}), **LABELS}
    spec["template"]["spec"] |= {"restartPolicy": "Never", "terminationGracePeriodSeconds": STOP_SECONDS}
    spec["template"]["spec"]["containers"][0] |= {
        "command": command,
        "workingDir": str(Path.cwd()),
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    return job


def job_name(run: str, unique: str) -> str:
    """Name of a run's Job, by Kubernetes' rule: lower-case letters, digits and dashes."""
    words = re.sub("[^a-z0-9]+", "-", run.lower()).strip("-")
    room = LONGEST_NAME - len("grpo--") - len(unique)
    return "-".join(filter(None, ("grpo", words[:room].strip("-"), unique)))


def _at(template: dict[str, Any], place: tuple[str | int, ...]) -> Any:
    found: Any = template
    for key in place:
        found = found[key] if isinstance(key, int) else (found or {}).get(key)  # type: ignore[index]
    return found


def _quantities_as_text(part: Any) -> None:
    """Turn numbers in `limits` and `requests` into text: YAML reads `cpu: 8` as a number, which the API also
    accepts."""
    if isinstance(part, list):
        for each in part:
            _quantities_as_text(each)
    if isinstance(part, dict):
        for key, value in part.items():
            _quantities_as_text(value)
            if key in ("limits", "requests") and isinstance(value, dict):
                part[key] = {name: str(it) if isinstance(it, int | float) else it for name, it in value.items()}
