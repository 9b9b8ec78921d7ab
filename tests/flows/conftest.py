from __future__ import annotations

import logging
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.conftest import write_config


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration file, and a storage root that is not there yet."""
    monkeypatch.setenv("GRPO_STORAGE", str(tmp_path / "storage"))
    return write_config(tmp_path)


@pytest.fixture
def without_prefect(monkeypatch: pytest.MonkeyPatch) -> None:
    """The flow of a sweep runs as a function."""
    monkeypatch.setattr("flows.sweep.get_run_logger", lambda: logging.getLogger("sweep"))
    for name in ("tags", "ending"):
        monkeypatch.setattr(f"flows.sweep.{name}", lambda *_: nullcontext())
