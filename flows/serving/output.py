"""Output of the processes that serve, which pass on what their flow runs print."""

from __future__ import annotations

import io
import sys
from contextlib import suppress
from typing import Any


class _Lossy(io.FileIO):
    """A file that loses what it cannot take."""

    def write(self, data: Any) -> int:
        with suppress(OSError):
            return super().write(data)
        return memoryview(data).nbytes


def outlive_output() -> None:
    """Lose from now on what standard output and standard error cannot take (the disk of the log is full, the terminal
    is gone): Prefect would end the flow run that printed it."""
    for name in ("stdout", "stderr"):
        number = getattr(sys, name).fileno()
        raw = io.BufferedWriter(_Lossy(number, "w", closefd=False))
        setattr(sys, name, io.TextIOWrapper(raw, errors="replace", line_buffering=True))
