"""A process that leaves without freeing its memory ends as any other: exit handlers, output, exit status."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from grpo_core.system.processes import importing

PROGRAM = """
import atexit, sys
from grpo_core.system.processes import run_and_leave
class Freed:
    def __del__(self): print("freed")
kept = Freed()
def main():
    atexit.register(print, "handler")
    print("work")
    {end}
run_and_leave(main)
"""


@pytest.mark.parametrize(
    ("end", "status", "error"),
    [
        ("pass", 0, ""),
        ("sys.exit()", 0, ""),
        ("sys.exit(3)", 3, ""),
        ("sys.exit('no data')", 1, "no data"),
        ("1 / 0", 1, "ZeroDivisionError"),
    ],
)
def test_a_process_that_leaves_keeps_its_output_handlers_and_exit_status(end: str, status: int, error: str) -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM.format(end=end)], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (status, "work\nhandler\n")
    assert error in ended.stderr


def test_the_collector_rests_during_imports_only() -> None:
    with importing(), importing():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ImportError), importing():
        raise ImportError
    assert gc.isenabled()
