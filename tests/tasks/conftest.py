"""Every test of the stages works in a folder whose name is a pattern: a library that takes a path for a pattern finds
other files, or none."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def tmp_path(tmp_path: Path) -> Path:
    (folder := tmp_path / "[a] *").mkdir()
    return folder
