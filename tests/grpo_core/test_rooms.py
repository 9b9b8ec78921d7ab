"""Each room of grpo_core explains itself, and names only modules that exist; no folder of the code has too many."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

import grpo_core

ROOT = Path(grpo_core.__file__).parent
ROOMS = sorted(init.parent for init in ROOT.rglob("__init__.py"))


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.relative_to(ROOT).as_posix())
def test_every_room_has_a_short_readme_and_one_line_about_itself(room: Path) -> None:
    text = (room / "README.md").read_text()
    assert len([line for line in text.splitlines() if not line.startswith("|")]) <= 25
    about = ast.get_docstring(ast.parse((room / "__init__.py").read_text()))
    assert about and len(about.splitlines()) == 1
    named = re.findall(r"[`(]((?:\.\./|\w+/)*\w+\.py)[`)]", text) + re.findall(r"\b(config/\w+\.py)\b", text)
    assert [name for name in named if not any((folder / name).exists() for folder in (room, ROOT, ROOT.parent))] == []


def test_no_folder_of_the_code_has_more_modules_than_contributing_says() -> None:
    most = int(re.findall(r"folders of at most (\d+) modules", (ROOT.parent / "CONTRIBUTING.md").read_text())[0])
    files = (file for package in ("flows", "tasks", "grpo_core") for file in (ROOT.parent / package).rglob("*.py"))
    modules = Counter(str(file.parent) for file in files if file.name != "__init__.py")
    assert {folder: count for folder, count in modules.items() if count > most} == {}
