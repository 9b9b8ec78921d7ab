"""A training that stands still where a test wants to act."""

from __future__ import annotations

from pathlib import Path

from tests.conftest import make_model, write_sums

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


def write_inputs(folder: Path) -> Path:
    """Model, data and the reward, which is imported with this folder on the path."""
    (folder / "holding.py").write_text(REWARD)
    make_model(folder / "base")
    write_sums(folder / "train.parquet", 10, 50)
    write_sums(folder / "eval.parquet", 60, 76)
    return folder
