"""Signs of life through files of a shared disk, for machines that have no connection to each other.

The writer replaces the file every BEAT_SECONDS with another content; the reader opens it each time, since NFS shows
changes to those that open a file. After SILENCE_SECONDS without a change the writer counts as gone.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from grpo_core.system.descendants import KILL_SECONDS
from tasks.stages.files import read_json

BEAT_SECONDS = 4.0
POLL_SECONDS = 0.5
SILENCE_SECONDS = 60.0  # as long as NFS may show an earlier state of a folder
ENDING_SECONDS = (
    SILENCE_SECONDS + BEAT_SECONDS + KILL_SECONDS
)  # after the last sign, in which a machine ends everything


class Signs:
    """What another machine writes into a file, and for how long it has not changed."""

    def __init__(self, path: Path):
        self.path, self.content, self.changed = path, dict[str, Any](), time.monotonic()

    def read(self) -> bool:
        """Read the file; true if it has changed since it was last read."""
        try:
            found = read_json(self.path)
        except OSError:  # a disk that is away for a moment
            return False
        if not found or found == self.content:
            return False
        self.content, self.changed = found, time.monotonic()
        return True

    def silence(self) -> float:
        """Seconds since the last change, or since the beginning without one."""
        return time.monotonic() - self.changed
