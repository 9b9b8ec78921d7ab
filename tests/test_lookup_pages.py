"""The pages to look things up in have everything that the code has, and nothing else: commands, environment variables,
stages, messages, GPUs."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest

from flows.cli.commands_page import commands_as_markdown
from grpo_core.planning.hardware import MEMORY_MIB
from tasks.stages.table import ALL_STAGES
from tests.command_line import fenced, grpo_commands

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


TEXTS = {path: list(_texts(path)) for path in _sources()}


def test_the_page_of_the_commands_is_what_make_reference_writes() -> None:
    assert (REFERENCE / "commands.md").read_text() == commands_as_markdown(), "run `make reference`"


def test_every_variable_of_this_project_is_on_the_page_of_environment_variables_and_no_other() -> None:
    used = {text for text in chain.from_iterable(TEXTS.values()) if OURS.fullmatch(text)}
    page = (REFERENCE / "environment-variables.md").read_text()
    assert set(re.findall(r"^\| `(GRPO_[A-Z_]+)` \|", page, re.MULTILINE)) == used
    named = {name for file in DOCS.rglob("*.md") for name in OURS.findall(file.read_text())}
    assert named - used <= {"GRPO_IMAGE"}, "of docs/how-to/work-pools/*.yaml alone"


def test_the_stages_of_how_it_works_are_those_of_the_table() -> None:
    page = (DOCS / "explanation" / "how-it-works.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| `(.*?)/?` \|$", page, re.MULTILINE)
    asked = {stage.name: f" Only with `{stage.asked_by}`." for stage in ALL_STAGES if stage.asked_by}
    assert rows == [(it.name, it.meaning + asked.get(it.name, ""), it.output) for it in ALL_STAGES]
    [picture] = fenced(page, "mermaid")
    for stage in ALL_STAGES:
        for read in stage.reads:
            assert re.search(rf"\b{read.name}\b", picture) and re.search(rf"\b{stage.name}\b", picture)


MESSAGES = re.findall(r"^\| `(.+?)` \|", TROUBLE.replace(r"\`", "\0"), re.MULTILINE)
OF_OTHERS = {"grpo: command not found", "Python 3.11 is needed, and …"}  # the shell's, and the Makefile's


def test_the_page_of_messages_has_many() -> None:
    assert len(MESSAGES) > 30 and set(MESSAGES) > OF_OTHERS


@pytest.mark.parametrize("message", [it for it in MESSAGES if it not in OF_OTHERS])
def test_a_message_on_the_page_is_one_that_the_code_gives(message: str) -> None:
    wanted = re.sub(r"…+", "…", message.replace("\0", "`")).strip("… ")
    pattern = re.compile(".*?".join(map(re.escape, re.split(" ?… ?", wanted))), re.DOTALL)
    assert [path for path, texts in TEXTS.items() if any(map(pattern.search, texts))], "no such message"


def test_the_page_of_the_plan_names_the_gpus_whose_memory_is_known() -> None:
    said = re.search(r"Known by name: (.*?)\.\n", (REFERENCE / "plan.md").read_text(), re.DOTALL)
    assert said and set(re.findall(r"`(.*?)`", said[1])) == MEMORY_MIB.keys()


@pytest.mark.parametrize("page", sorted({*HOW_TO.glob("*.md"), *(DOCS / "tutorials").rglob("*.md")}), ids=lambda it: it.stem)
def test_a_page_with_commands_says_how_the_shell_finds_them(page: Path) -> None:
    text = page.read_text()
    if grpo_commands(text) and page.stem != "install":
        told = "export PATH=" in text or "install.md#your-shell" in text
        assert told, "link how-to/install.md#your-shell near the first command"
