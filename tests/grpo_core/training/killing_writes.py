"""A training whose main process kills itself ($KILLED_AT) while it writes the checkpoint of step 4 and trains on.

As the module of the reward, it comes into each process.
"""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

from grpo_core.system import files
from grpo_core.training import checkpoint, loop

# Where in the write, and the checkpoint from which the training then goes on.
POINTS = {"after the first file": 2, "before the manifest": 2, "before the rename": 2, "before old ones go": 4}

_begun, _trained_on = threading.Event(), threading.Event()


def score(completion_ids: list[list[int]]) -> list[float]:
    return [-float(len(ids)) for ids in completion_ids]


def _telling(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, whose fifth call tells the thread that writes the checkpoint of step 4 to go on."""
    calls = itertools.count(1)

    def telling(*args: Any) -> Any:
        if _dies() and next(calls) == 5:
            _begun.wait()
            _trained_on.set()
        return function(*args)

    return telling


def _dies() -> bool:
    return "KILLED_AT" in os.environ and os.environ.get("RANK", "0") == "0"


def _dying(point: str, function: Callable[..., Any], *, after: bool) -> Callable[..., Any]:
    """The function; the process is killed before or after it, where it works on the checkpoint of step 4."""

    def dying(*args: Any) -> Any:
        concerned = (
            os.environ.get("KILLED_AT") == point
            and _dies()
            and any("step-000004" in str(argument) for argument in args)
        )
        if not concerned:
            return function(*args)
        if after:
            function(*args)
        _begun.set()
        _trained_on.wait()
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("killed")

    return dying


loop.update = _telling(loop.update)
checkpoint.write = _dying("after the first file", checkpoint.write, after=True)
checkpoint.checksum = _dying("before the manifest", checkpoint.checksum, after=False)
files.publish = _dying("before the rename", files.publish, after=False)
checkpoint.replace_folder = _dying("before old ones go", checkpoint.replace_folder, after=True)
