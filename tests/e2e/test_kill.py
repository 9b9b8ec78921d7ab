"""`grpo run` killed in the middle of training leaves no process and loses no update; the next run goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import tomli_w

from benchmarks.command import python_path
from tests.conftest import config_values
from tests.e2e.holding import until_stuck, write_patient

pytestmark = pytest.mark.e2e


def test_a_killed_run_leaves_no_process_and_continues_from_its_last_update(tmp_path: Path, model_folder: Path) -> None:
    write_patient(tmp_path)
    values = config_values(model_folder, tmp_path, max_steps=6, save_steps=2)
    values["rewards"] = [{"function": "patience:patient"}]
    config = tmp_path / "config.toml"
    config.write_text(tomli_w.dumps(values))
    go_on = tmp_path / "go-on"
    environment = {
        **os.environ,
        "GRPO_STORAGE": str(tmp_path / "storage"),
        "PYTHONPATH": python_path(tmp_path),
        "MAY_GO_ON": str(go_on),
    }
    command = [sys.executable, "-m", "flows.cli.main", "run", str(config), "--set", "name=killed"]
    process, started, _ = until_stuck(command, environment)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=120)
    assert not psutil.wait_procs(started, timeout=60)[1]

    go_on.touch()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "storage" / "runs" / "killed" / "training" / "result.json").read_text())
    assert (result["resumed_at_step"], result["counted"]["updates"]) == (3, 6)
