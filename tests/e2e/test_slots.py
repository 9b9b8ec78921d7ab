"""Trainings that share the GPUs of a machine: as many as fit train, each on its own GPUs, and the next one waits."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.command import python_path
from grpo_core.config.files import dump_config, load_config, parse_config
from tests.conftest import config_values
from tests.e2e.holding import write_patient
from tests.e2e.place import PROJECT
from tests.e2e.test_cancel import _processes, _wait_until_stuck, _write_config
from tests.nvidia_smi import put_nvidia_smi
from tests.processes import wait_for, words
from tests.serving import Served, grpo_serve, prefect_server

pytestmark = pytest.mark.e2e


@pytest.fixture
def server(tmp_path: Path, model_folder: Path) -> Iterator[Served]:
    """A Prefect server of a machine with two GPUs (pretended: nothing is computed on them)."""
    put_nvidia_smi(tmp_path, 2)
    write_patient(tmp_path)
    _write_config(tmp_path, "template", config_values(model_folder, tmp_path, max_steps=6))
    paths: dict[str, Any] = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHONPATH": python_path(tmp_path, PROJECT),
    }
    with prefect_server(tmp_path, MAY_GO_ON=str(tmp_path / "never"), **paths) as server:
        yield server


def _train(server: Served, name: str, **keys: Any) -> str:
    """Id of a flow run that trains a copy of the template, with other keys of [train]."""
    runs = server.storage / "runs"
    shutil.copytree(runs / "template", runs / name)
    values = load_config(runs / name / "config.toml").model_dump(mode="json", exclude_none=True)
    values["train"] |= keys
    (runs / name / "config.toml").write_text(dump_config(parse_config({**values, "name": name})))
    if keys:
        _do(server, "plan", name)
    return server.trigger("train/local", run=name)


def _do(server: Served, stage: str, name: str) -> None:
    done = server.wait(server.trigger(f"{stage}/local", run=name))
    assert done["state_type"] == "COMPLETED", server.messages(done["id"])


def _gpus(runner: psutil.Process, name: str) -> set[str]:
    trained_by = [it for it in _processes(runner, name) if "grpo_core.train" in " ".join(words(it))]
    return {it.environ()["CUDA_VISIBLE_DEVICES"] for it in trained_by}


def test_two_trainings_share_two_gpus_and_one_that_wants_both_waits_for_them(server: Served) -> None:
    with grpo_serve(server) as runner:
        for stage in ("validate", "plan"):
            _do(server, stage, "template")
        first, second = (_train(server, name) for name in ("one", "two"))
        _wait_until_stuck(server, "one")
        _wait_until_stuck(server, "two")
        assert sorted([_gpus(runner, "one"), _gpus(runner, "two")], key=min) == [{"0"}, {"1"}]
        waiting = _train(server, "both", num_processes=2, per_device_train_batch_size=4)
        sentence = (
            "waiting for 2 slots of the concurrency limit grpo-training: 2 of 2 taken (by one, two); number 1 in line"
        )
        wait_for(lambda: sentence in server.messages(waiting))

        for run_id in (first, second):
            server.cancel(run_id)
            server.wait(run_id, "CANCELLED")
        _wait_until_stuck(server, "both")
        assert _gpus(runner, "both") == {"0,1"}
        server.cancel(waiting)
        server.wait(waiting, "CANCELLED")
