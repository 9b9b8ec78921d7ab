"""`grpo run` killed in the middle of training leaves no process and loses no update; the next run goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
import tomli_w

from benchmarks.command import python_path
from tests.conftest import config_values, write_sums
from tests.processes import words

pytestmark = pytest.mark.e2e

# Training stops for good inside the fourth rollout, until the file that allows it to go on exists.
REWARD = """
import os, threading
calls = []
def patient(completions, completion_ids):
    calls.append(1)
    if len(calls) == 4 and not os.path.exists(os.environ["MAY_GO_ON"]):
        print("stuck in the fourth rollout", flush=True)
        threading.Event().wait()
    return [-float(len(ids)) for ids in completion_ids]
"""


def test_a_killed_run_leaves_no_process_and_continues_from_its_last_update(tmp_path: Path, model_folder: Path) -> None:
    (tmp_path / "patience.py").write_text(REWARD)
    write_sums(tmp_path / "train.parquet", 10, 34)
    write_sums(tmp_path / "eval.parquet", 60, 76)
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
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    watchdog = threading.Timer(300, process.kill)
    watchdog.start()
    assert process.stdout is not None
    seen = next((line for line in process.stdout if "stuck in the fourth rollout" in line), None)
    watchdog.cancel()
    assert seen is not None
    started = psutil.Process(process.pid).children(recursive=True)
    assert any("grpo_core.train" in " ".join(words(child)) for child in started)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=120)
    assert not psutil.wait_procs(started, timeout=60)[1]

    go_on.touch()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "storage" / "runs" / "killed" / "training" / "result.json").read_text())
    assert (result["resumed_at_step"], result["counted"]["updates"]) == (3, 6)
