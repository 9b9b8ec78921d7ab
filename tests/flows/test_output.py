"""What becomes of the output of a process that serves."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.command import ROOT

PROGRAM = """
import os, sys
from flows.serving.output import outlive_output
outlive_output()
for number in range(3):
    print("printed", number)
    print("said", number, file=sys.stderr)
os._exit(3)  # by now all of it has left the process
"""


@pytest.mark.parametrize("lost", ["stdout", "stderr"])
@pytest.mark.parametrize("to", ["a full disk", "a closed pipe"])
def test_output_that_cannot_be_written_is_lost_and_ends_nothing(to: str, lost: str, tmp_path: Path) -> None:
    closed, broken = os.pipe()
    os.close(closed)
    with Path("/dev/full").open("w") as full, os.fdopen(broken, "w") as pipe, (tmp_path / "log").open("w") as log:
        files = {"stdout": log, "stderr": log, lost: full if to == "a full disk" else pipe}
        done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, **files)
    word = {"stdout": "said", "stderr": "printed"}[lost]
    assert done.returncode == 3
    assert (tmp_path / "log").read_text() == "".join(f"{word} {number}\n" for number in range(3))
