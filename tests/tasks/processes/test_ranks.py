"""torchrun's processes on one machine, and what they say."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from grpo_core.config.run import TrainConfig
from grpo_core.training.interrupt import EXIT_STATUS
from tasks.processes.launch import torchrun
from tasks.processes.machine import free_port

pytestmark = pytest.mark.served

# On its first SIGTERM it saves for a second, and says each line that the end of a training says.
SAVING = """
import signal, sys, time
told = []
signal.signal(signal.SIGTERM, lambda *_: told.append(1))
print("up", flush=True)
while not told:
    time.sleep(0.01)
print("told", flush=True)
end = time.monotonic() + 1
while time.monotonic() < end:
    time.sleep(0.05)
    print("saving", flush=True)
print("saved", flush=True)
sys.exit(143)
"""


def test_processes_save_and_are_heard_however_often_their_launcher_is_told_to_end(tmp_path: Path) -> None:
    (tmp_path / "saving.py").write_text(SAVING)
    words = torchrun(TrainConfig(), "127.0.0.1", free_port())
    process = subprocess.Popen(
        [sys.executable, "-m", "tasks.processes.ranks", *words, tmp_path / "saving.py"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    lines = iter(process.stdout.readline, "")
    assert "up\n" in lines
    process.terminate()
    assert "told\n" in lines
    for _ in range(5):  # as Slurm, its srun and the supervisor do, within milliseconds
        process.terminate()
        time.sleep(0.05)
    assert "saved\n" in lines
    assert process.wait(timeout=60) == EXIT_STATUS
