"""Each room of grpo_core explains itself, and names only modules that exist."""

from __future__ import annotations

import ast
import re
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
