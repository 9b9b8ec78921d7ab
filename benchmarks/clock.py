"""Records when each step of a training ended, and the peak memory of the counted steps."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any


class Clock:
    """A clock for steps: call `begin` when the training begins and `step` after each step; the first `warm_up` steps do
    not count."""

    def __init__(self, warm_up: int):
        self.warm_up = warm_up
        self.times: list[float] = []
        self.before = 0

    def begin(self) -> None:
        self.before = _memory("VmRSS")
        self.times = [time.perf_counter()]

    def step(self) -> None:
        self.times.append(time.perf_counter())
        if len(self.times) == self.warm_up + 1:
            Path("/proc/self/clear_refs").write_text("5")  # the peak from here on

    def finish(self, result: Path, **more: Any) -> None:
        seconds = [after - before for before, after in zip(self.times, self.times[1:], strict=False)]
        figures = {"seconds": seconds[self.warm_up :], "peak_mib": _memory("VmHWM"), "before_mib": self.before}
        result.write_text(json.dumps(figures | more))


def _memory(kind: str) -> int:
    """Memory of this process in MiB: "VmRSS" now, "VmHWM" at the peak."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(kind):
            return int(line.split()[1]) // 1024
    raise RuntimeError(f"/proc/self/status has no {kind}")
