"""A training that hangs is ended with a reason, and goes on to what an undisturbed one ends with."""

from __future__ import annotations

import json
import logging
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks.command import python_path
from grpo_core.config.files import load_config
from grpo_core.system.progress import RANKS
from tasks.processes.launch import launch_with_restarts
from tasks.processes.training import run_training
from tasks.processes.watchdog import HangError
from tasks.stages.run import Context
from tests.conftest import config_values, make_run
from tests.e2e.place import metrics

pytestmark = pytest.mark.e2e

# Before its fourth generation batch is sampled, scored or learned from, the last process stands still, once per fault.
REWARD = """
import ctypes, os, signal, threading
from pathlib import Path
from grpo_core.rollout.transformers_engine import TransformersEngine
from grpo_core.training import update

mutex = ctypes.create_string_buffer(64)
calls, faults = [], os.environ["FAULTS"].split()
last = os.environ.get("RANK", "0") == str(int(os.environ.get("WORLD_SIZE", "1")) - 1)

def stand_still(place):
    left = [fault for fault in faults if not Path(os.environ["MARKS"], fault).exists()]
    if last and len(calls) == int(os.environ.get("AFTER", "3")) and left and left[0].startswith(place):
        Path(os.environ["MARKS"], left[0]).touch()
        if left[0].endswith("stopped"):
            os.kill(os.getpid(), signal.SIGSTOP)
        elif left[0].endswith("held"):
            for _ in range(2):  # locked twice, it waits for itself
                ctypes.PyDLL(None).pthread_mutex_lock(mutex)
        else:
            threading.Event().wait()

def sampling(*arguments, generate=TransformersEngine.generate):
    stand_still("sampling")
    yield from generate(*arguments)

def together(*arguments, average=update.average_gradients):
    stand_still("update")
    average(*arguments)

TransformersEngine.generate, update.average_gradients = sampling, together

def short(completion_ids):
    stand_still("reward")
    calls.append(1)
    return [-float(len(ids)) for ids in completion_ids]
"""


class Trainings:
    def __init__(self, folder: Path, model: Path, patch: pytest.MonkeyPatch):
        self.folder, self.model, self.patch = folder, model, patch
        (folder / "faulty.py").write_text(REWARD)
        patch.syspath_prepend(folder)
        patch.setenv("PYTHONPATH", python_path(folder, Path(__file__).parents[2]))
        patch.setenv("MARKS", str(folder))

    def run(self, name: str, faults: list[str], **train: Any) -> Path:
        keys = {"max_steps": 16, "save_steps": 1, "hang_timeout": 5.0, **train}
        values = config_values(self.model, self.folder, **keys)
        values["rewards"] = [{"function": "faulty:short", "timeout": 2.0}]
        self.patch.setenv("FAULTS", " ".join(faults))
        run = make_run(self.folder / name, values)
        context = Context(load_config(run / "config.toml"), run, run / "training")
        context.partial.mkdir()
        run_training(context, print, {}, logging.getLogger("stage"))
        return run

    def evaluated(self, name: str, faults: list[str], **train: Any) -> dict[str, Any]:
        """Report of an evaluation, in which the model that the training began with stands for the one it made."""
        values = config_values(self.model, self.folder, hang_timeout=5.0, num_processes=2, sharding="full", **train)
        values["rewards"] = [{"function": "faulty:short"}]
        self.patch.setenv("FAULTS", " ".join(faults))
        self.patch.setenv("AFTER", "0")
        run = make_run(self.folder / name, values)
        shutil.copytree(self.model, run / "training" / "model")
        (folder := run / "evaluation").mkdir()
        command = ["-m", "grpo_core.evaluate", str(run), "--output", str(folder)]
        config = load_config(run / "config.toml").where_evaluated
        launch_with_restarts(config, command, logging.getLogger("stage"), folder, {})
        report = json.loads((folder / "report.json").read_text())
        return {name: value for name, value in report.items() if name != "start_seconds"}


@pytest.fixture
def trainings(tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Trainings:
    return Trainings(tmp_path, model_folder, monkeypatch)


@pytest.mark.parametrize("keys", [{"num_processes": 1}, {"num_processes": 2, "sharding": "full"}])
def test_a_training_that_hangs_again_and_again_ends_with_what_it_would_have(
    trainings: Trainings, caplog: pytest.LogCaptureFixture, keys: dict[str, Any]
) -> None:
    faults = ["sampling", "update", "sampling-held", "reward-stopped"]
    last = keys["num_processes"] - 1
    undisturbed = metrics(trainings.run("undisturbed", [], **keys))
    run = trainings.run("disturbed", faults, max_restarts=len(faults), **keys)
    assert metrics(run) == undisturbed
    assert ('"time/sampling/slowest_rank"' in (run / "training" / "metrics.jsonl").read_text()) == (last > 0)
    reasons = [record.message for record in caplog.records if "restart" in record.message]
    others = r".*; 1 of 2 processes wait for it" if last else ".*"
    for number, (reason, fault) in enumerate(zip(reasons, faults, strict=True), 1):
        where, stopped = fault.partition("-")[0], fault.endswith("stopped")
        place = r", and is stopped \(SIGSTOP\)" if stopped else r".* at .*faulty.py:\d+ \(stand_still\)"
        assert re.match(
            rf"restart {number} of 4 \(train.max_restarts\): "
            rf"hang: rank {last} has not moved for \d+ s in {where}[^,;]*{place}{others}",
            reason,
        ), reason
    for rank in range(keys["num_processes"]):
        stacks = (run / "training" / RANKS / f"{rank}.stacks").read_text()
        assert len(re.findall(rf"rank {rank}, process \d+, in", stacks)) == len(faults)
        assert stacks.count("grpo_core/training/loop.py") >= len(faults)


def test_an_evaluation_that_hangs_begins_again(trainings: Trainings, caplog: pytest.LogCaptureFixture) -> None:
    undisturbed = trainings.evaluated("undisturbed", [])
    assert trainings.evaluated("disturbed", ["sampling-held"], max_restarts=1) == undisturbed
    [reason] = [record.message for record in caplog.records if "restart" in record.message]
    said = r"restart 1 of 1 .*: hang: rank 1 has not moved for \d+ s in sampling at .*faulty.py:\d+ \(stand_still\)"
    assert re.match(said, reason), reason


def test_a_reward_that_hangs_in_c_is_named_and_not_started_again(
    trainings: Trainings, caplog: pytest.LogCaptureFixture
) -> None:
    said = r"rank 1 has not moved for \d+ s in reward 'short' at .*; 1 of 2 processes wait"
    with pytest.raises(HangError, match=said):
        trainings.run("held", ["reward-held"], num_processes=2, max_restarts=3)
    assert not [record for record in caplog.records if "restart" in record.message]
