"""A training that stands still where a test wants to act."""

from __future__ import annotations

import subprocess
import threading
from pathlib import Path
from typing import Any

import psutil

from tests.conftest import write_data, write_inputs
from tests.processes import words

FUNCTION = "holding:held_up"  # a reward: the shorter, the better

# Stands still in its call number N, which in training is rollout N, for as long as the file `hold` says N.
REWARD = """
import threading
from pathlib import Path
HOLD = Path(__file__).with_name("hold")
calls = []
def held():
    return HOLD.exists() and HOLD.read_text() == str(len(calls))
def held_up(completions, completion_ids):
    calls.append(1)
    if held():
        print("standing still in rollout", len(calls), flush=True)
        HOLD.with_name("waiting").write_text(str(len(calls)))
        while held():
            threading.Event().wait(0.05)
    return [-float(len(ids)) for ids in completion_ids]
"""


# Training stops for good inside the fourth rollout, until the file that allows it to go on exists.
PATIENCE = """
import os, threading
calls = []
def patient(completions, completion_ids):
    calls.append(1)
    if len(calls) == 4 and not os.path.exists(os.environ["MAY_GO_ON"]):
        print("stuck in the fourth rollout", flush=True)
        threading.Event().wait()
    return [-float(len(ids)) for ids in completion_ids]
"""


def write_patient(folder: Path) -> None:
    """Data, and the reward `patience:patient`, which is imported with this folder on the path."""
    (folder / "patience.py").write_text(PATIENCE)
    write_data(folder)


def until_stuck(
    command: list[str], environment: dict[str, str], **options: Any
) -> tuple[subprocess.Popen[str], list[psutil.Process], str]:
    """A command whose training has stopped for good, the processes that it has started, and what it has said."""
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options
    )
    watchdog, lines = threading.Timer(480, process.kill), [""]
    watchdog.start()
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line)
        if "stuck in the" in line:
            break
    watchdog.cancel()
    assert "stuck in the" in lines[-1], "".join(lines)
    started = psutil.Process(process.pid).children(recursive=True)
    assert any("grpo_core.train" in " ".join(words(child)) for child in started)
    return process, started, "".join(lines)


def write_held(folder: Path) -> Path:
    """Model, data and the reward, which is imported with this folder on the path."""
    (folder / "holding.py").write_text(REWARD)
    return write_inputs(folder, held_out=16)
