from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tests.conftest import config_values, write_data
from tests.tasks.stages.small_stages import Values, configure, pipeline


@pytest.fixture
def values(tmp_path: Path, model_folder: Path) -> Values:
    write_data(tmp_path)
    return config_values(model_folder, tmp_path)


@pytest.fixture
def run(tmp_path: Path, values: Values, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run whose five stages are done, each by the smallest work there is."""
    monkeypatch.setattr("tasks.stages.run.get_run_logger", lambda: logging.getLogger("test"))  # there is no flow run
    monkeypatch.setenv("GRPO_STORAGE", str(tmp_path / "storage"))
    folder = tmp_path / "storage" / "runs" / "test"
    folder.mkdir(parents=True)
    configure(folder, values)
    pipeline(folder)
    return folder
