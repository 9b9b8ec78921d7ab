"""Storages that earlier versions made are read by this one, and nothing in them is made again."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest

from tasks.stages.condition import conditions
from tasks.stages.run import Context
from tasks.stages.run_directory import find_runs, read_config
from tasks.stages.table import STAGES
from tests.tasks.stages.small_stages import Values, do

STORAGES = Path(__file__).parents[2] / "storages"


@pytest.mark.parametrize("version", sorted(path.name for path in STORAGES.iterdir() if path.is_dir()))
def test_every_stage_of_an_earlier_version_s_storage_is_up_to_date_and_skipped(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(context: Context) -> Values:
        raise AssertionError("made again")

    folder = shutil.copytree(STORAGES / version, tmp_path / "storage")
    monkeypatch.setattr("tasks.stages.run.get_run_logger", lambda: logging.getLogger("test"))  # there is no flow run
    monkeypatch.setenv("GRPO_STORAGE", str(folder))
    monkeypatch.chdir(folder)
    [run] = find_runs().values()
    found = conditions(run, read_config(run))
    assert {name: (each.state, each.reason) for name, each in found.items()} == {
        stage.name: ("up to date", "") for stage in STAGES
    }
    assert not any(do(stage, run, work=refuse) for stage in STAGES)
