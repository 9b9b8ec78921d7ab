"""The processes of a training: what they end with, and two of them that are killed or told to stop."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from grpo_core.train import main as train_process
from tests.conftest import make_run, with_keys
from tests.grpo_core.training import killing
from tests.grpo_core.training.launching import REWARD, TWO_PROCESSES, finish, kill_tree, started
from tests.grpo_core.training.training import assert_same

pytestmark = pytest.mark.served


@pytest.mark.e2e
def test_two_processes_killed_and_started_again_end_with_the_same_weights(
    values: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "patience.py").write_text(REWARD)
    values["rewards"] = [{"function": "patience:patient"}]
    keys = {"num_processes": 2, "per_device_train_batch_size": 4, "max_steps": 7, "save_steps": 2, "num_iterations": 2}
    whole, run = (make_run(tmp_path / name, with_keys(values, **keys)) for name in ("whole", "run"))
    with started(run, tmp_path, 3, *TWO_PROCESSES) as process:
        assert process.stdout is not None
        assert any("stuck" in line for line in process.stdout)
        kill_tree(process.pid)
    for folder in (run, whole):
        with started(folder, tmp_path, 0, *TWO_PROCESSES) as process:
            finish(process)
    resumed_at = json.loads((run / "training" / "result.json").read_text())["resumed_at_step"]
    assert resumed_at in (2, 4), "the checkpoint of step 4 is being written when the training is killed"
    assert_same(run, whole)


TELLING = """
import os, pathlib, signal, time
told, calls, telling = pathlib.Path(__file__).with_name("told"), [], False
def tell(completion_ids):
    global telling
    calls.append(1)
    if len(calls) == 4 and os.environ["RANK"] == "0" and not told.exists():
        told.touch()
        telling = True
        os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(telling)
    return [-float(len(ids)) for ids in completion_ids]
"""


@pytest.mark.e2e
def test_two_processes_told_to_stop_agree_where_and_end_with_the_same_weights(
    values: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "telling.py").write_text(TELLING)
    values["rewards"] = [{"function": "telling:tell"}]
    keys = {"num_processes": 2, "per_device_train_batch_size": 4, "max_steps": 20, "save_steps": 100}
    whole, run = (make_run(tmp_path / name, with_keys(values, **keys)) for name in ("whole", "run"))
    with started(run, tmp_path, 0, *TWO_PROCESSES) as process:
        output, _ = process.communicate()
    assert process.returncode
    assert "training: told to stop" in output
    for folder in (run, whole):
        with started(folder, tmp_path, 0, *TWO_PROCESSES) as process:
            finish(process)
    assert json.loads((run / "training" / "result.json").read_text())["resumed_at_step"] in range(3, 20)
    assert_same(run, whole)


def test_the_process_of_a_training_told_to_stop_ends_with_status_143(
    values: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run", values)
    assert os.waitstatus_to_exitcode(killing.train(run, 6, lambda: killing.end(signal.SIGTERM))) == 143
    assert "training: told to stop, the checkpoint of step" in capfd.readouterr().out


def test_a_training_that_cannot_start_ends_with_one_sentence(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run", with_keys(values, num_processes=2))
    monkeypatch.setattr(sys, "argv", ["grpo_core.train", str(run)])
    with pytest.raises(SystemExit, match="the plan is for num_processes=2, but 1 were started") as end:
        train_process()
    assert len(str(end.value).splitlines()) == 1
