"""The pages to look things up in have everything that the code has, and nothing else: commands, environment variables,
stages, messages, GPUs."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import json
import re
import runpy
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client

from flows.cli.reference_pages import commands_as_markdown
from flows.cli.serve import KEY
from grpo_core.environments.registry import ADAPTERS
from grpo_core.planning.hardware import MEMORY_MIB
from grpo_core.rewards.builtin.code_tests import FUNCTIONS, read_test
from tasks.stages.table import ALL_STAGES
from tests.command_line import fenced, grpo_commands, parse

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
REFERENCE, HOW_TO = DOCS / "reference", DOCS / "how-to"
TROUBLE = (HOW_TO / "troubleshooting.md").read_text()
OURS = re.compile(r"GRPO_[A-Z_]+")


def _sources() -> Iterator[Path]:
    """The files of the package."""
    for package in ("flows", "tasks", "grpo_core"):
        yield from (path for path in (ROOT / package).rglob("*.py") if "recipes" not in path.parts)


def _texts(source: Path) -> Iterator[str]:
    """Every text of a file, with `…` for each value in it, and texts that are added to each other as one."""
    inside: set[int] = set()
    for node in ast.walk(ast.parse(source.read_text())):
        if id(node) in inside or not isinstance(node, ast.JoinedStr | ast.Constant):
            continue
        parts = node.values if isinstance(node, ast.JoinedStr) else [node]
        inside |= {id(part) for part in parts}
        yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in parts)


@functools.cache
def _all_texts() -> dict[Path, list[str]]:
    return {path: list(_texts(path)) for path in _sources()}


def test_the_page_of_the_commands_is_what_make_reference_writes() -> None:
    assert (REFERENCE / "commands.md").read_text() == commands_as_markdown(), "run `make reference`"


def test_every_variable_of_this_project_is_on_the_page_of_environment_variables_and_no_other() -> None:
    used = {text for text in chain.from_iterable(_all_texts().values()) if OURS.fullmatch(text)}
    page = (REFERENCE / "environment-variables.md").read_text()
    assert set(re.findall(r"^\| `(GRPO_[A-Z_]+)` \|", page, re.MULTILINE)) == used
    named = {name for file in DOCS.rglob("*.md") for name in OURS.findall(file.read_text())}
    of_files = {"GRPO_IMAGE", "GRPO_WEBHOOK_SECRET"}  # of docs/how-to/work-pools/*.yaml, of examples/notifications
    assert named - used <= of_files


def test_the_stages_of_how_it_works_are_those_of_the_table() -> None:
    page = (DOCS / "explanation" / "how-it-works.md").read_text()
    rows = re.findall(r"^\| `([\w-]+)` \| (.*?) \| `(.*?)/?` \|$", page, re.MULTILINE)
    asked = {stage.name: f" Only with `{stage.asked_by}`." for stage in ALL_STAGES if stage.asked_by}
    assert rows == [(it.name, it.meaning + asked.get(it.name, ""), it.output) for it in ALL_STAGES]
    [picture] = fenced(page, "mermaid")
    assert {stage.name for stage in ALL_STAGES} <= set(re.findall(r"\b[a-z]+(?:-[a-z]+)*\b", picture))


MESSAGES = re.findall(r"^\| `(.+?)` \|", TROUBLE, re.MULTILINE)
OF_OTHERS = {"grpo: command not found", "Python 3.11, 3.12 or 3.13 is needed, and …"}  # the shell's, and the Makefile's


def test_the_page_of_messages_has_many() -> None:
    assert len(MESSAGES) > 30 and set(MESSAGES) > OF_OTHERS


@pytest.mark.parametrize("message", [it for it in MESSAGES if it not in OF_OTHERS])
def test_a_message_on_the_page_is_one_that_the_code_gives(message: str) -> None:
    wanted = re.sub(r"…+", "…", message).strip("… ")
    pattern = re.compile(".*?".join(map(re.escape, re.split(" ?… ?", wanted))), re.DOTALL)
    assert [path for path, texts in _all_texts().items() if any(map(pattern.search, texts))], "no such message"


def test_the_page_of_the_plan_names_the_gpus_whose_memory_is_known() -> None:
    said = re.search(r"Known by name: (.*?)\. For another", " ".join((REFERENCE / "plan.md").read_text().split()))
    assert said and set(re.findall(r"`(.*?)`", said[1])) == MEMORY_MIB.keys()


GUIDES = sorted({*HOW_TO.glob("*.md"), *(DOCS / "tutorials").rglob("*.md")})


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_a_page_with_commands_says_how_the_shell_finds_them(page: Path) -> None:
    text = page.read_text()
    if grpo_commands(text) and page.stem != "install":
        told = "export PATH=" in text or "install.md#your-shell" in text
        assert told, "link how-to/install.md#your-shell near the first command"


@pytest.mark.slow
def test_every_argument_of_a_built_in_environment_is_on_the_page() -> None:
    page = (HOW_TO / "environments.md").read_text().partition("## Environments that others have made")[2]
    for name, source in ADAPTERS.items():
        module, _, cls = source.partition(":")
        section = page.partition(f"**`{name}`**")[2].partition("\n**`")[0]
        for argument in list(inspect.signature(getattr(importlib.import_module(module), cls)).parameters):
            assert re.search(rf"\b{argument}\b", section), f"{name}: {argument}"


def test_every_form_of_a_unit_test_on_the_page_is_one_that_the_reward_reads() -> None:
    section = (REFERENCE / "rewards.md").read_text().partition("takes for a test\n")[2].partition("\n## ")[0]
    items = re.findall(r"^\| `([\"{].*?)` \|", section, re.MULTILINE)
    assert len(items) == 3
    for item in items:
        read_test(json.loads(item))
    of_types = {kind.__name__ for kind in (bool, dict, float, int, list, set, str, tuple)}
    assert set(FUNCTIONS) - of_types <= set(re.findall(r"`(\w+)`", section))


def test_the_page_of_kubernetes_shows_the_whole_definitions_of_its_file_with_what_is_to_be_added() -> None:
    page = (HOW_TO / "kubernetes.md").read_text()
    [shown] = map(yaml.safe_load, fenced(page, "yaml"))
    file = yaml.safe_load((HOW_TO / "work-pools" / "kubernetes.yaml").read_text())["definitions"]
    added = {"namespace": "training"}
    for variables in (file["variables"], file["cpu"]["job_variables"], file["gpu"]["job_variables"]):
        variables |= added
        variables["env"]["GRPO_CONFIGS"] = "/storage/configs"
    file["gpu"]["job_variables"]["service_account_name"] = "grpo-train"
    assert shown == file
    template = json.loads((HOW_TO / "work-pools" / "kubernetes-job.json").read_text())["variables"]["properties"]
    assert shown["gpu"]["job_variables"].keys() <= template.keys()
    volume = yaml.safe_load((HOW_TO / "kubernetes" / "storage.yaml").read_text())
    role = next(yaml.safe_load_all((HOW_TO / "kubernetes" / "role.yaml").read_text()))
    assert volume["metadata"] == {"name": file["variables"]["storage_claim"], **added}
    assert role["metadata"] == {"name": "grpo-train", **added}


def with_quantities(value: Any) -> Any:
    """A manifest with its quantities as text, which is how Kubernetes' client has them."""
    if isinstance(value, dict):
        texts = {
            key: {name: str(it) for name, it in value[key].items()} for key in ("limits", "requests") if key in value
        }
        return {key: with_quantities(inner) for key, inner in value.items()} | texts
    return [with_quantities(inner) for inner in value] if isinstance(value, list) else value


@pytest.mark.parametrize("name", ["role", "serve", "storage", "training"])
def test_a_manifest_has_only_fields_that_kubernetes_has_and_all_that_it_needs(name: str) -> None:
    api = client.ApiClient()
    for each in yaml.safe_load_all((HOW_TO / "kubernetes" / f"{name}.yaml").read_text()):
        text = with_quantities(each)
        found = api.deserialize(json.dumps(text), f"V1{each['kind']}", "application/json")
        assert api.sanitize_for_serialization(found) == text


def test_the_manifest_of_serving_starts_what_its_probes_and_its_service_ask() -> None:
    deployment, service = yaml.safe_load_all((HOW_TO / "kubernetes" / "serve.yaml").read_text())
    pod = deployment["spec"]["template"]
    [container] = pod["spec"]["containers"]
    program, *words = container["args"]
    assert program == "grpo"
    asked: dict[str, Any] = parse(words)
    assert (asked["host"], asked["vllm_options"][0]) == ("0.0.0.0", "--gpu-memory-utilization")
    [port] = container["ports"]
    assert (port["containerPort"], port["name"]) == (asked["port"], service["spec"]["ports"][0]["targetPort"])
    assert KEY in [variable["name"] for variable in container["env"]]
    assert {container[probe]["httpGet"]["path"] for probe in ("startupProbe", "readinessProbe")} == {"/health"}
    assert service["spec"]["selector"] == pod["metadata"]["labels"] == deployment["spec"]["selector"]["matchLabels"]
    page = (HOW_TO / "serve.md").read_text()
    assert asked["model"] in page and f"http://{service['metadata']['name']}.training/v1" in page


@pytest.mark.slow
def test_the_flow_of_the_page_on_events_is_the_deployment_that_the_page_starts(tmp_path: Path) -> None:
    page = (REFERENCE / "events.md").read_text()
    [code] = fenced(page, "python")
    (tmp_path / "take_champion.py").write_text(code)
    flow = runpy.run_path(str(tmp_path / "take_champion.py"))["take_champion"]
    assert f"start_deployment.py {flow.name}/production" in page
    assert [*flow.parameters.properties] == ["model", "version"]
