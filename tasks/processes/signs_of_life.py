"""Signs of life through files on a shared disk, for machines that have no connection to each other.

The writer replaces the file's content every BEAT_SECONDS; the reader opens the file each time, since NFS shows changes
only on opening. After SILENCE_SECONDS without a change, the writer counts as gone.
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
# After the last sign, until a machine has ended everything.
ENDING_SECONDS = SILENCE_SECONDS + BEAT_SECONDS + KILL_SECONDS


class Signs:
    """Signs of life that another machine writes into a file, and the time since they last changed."""

    def __init__(self, path: Path):
        self.path, self.content, self.changed = path, dict[str, Any](), time.monotonic()

    def read(self) -> bool:
        """Read the file; returns True if it has changed since the last read."""
        try:
            found = read_json(self.path)
        except OSError:  # the disk may be away for a moment
            return False
        if not found or found == self.content:
            return False
        self.content, self.changed = found, time.monotonic()
        return True

    def silence(self) -> float:
        """Seconds since the last change; without a change, seconds since the beginning."""
        return time.monotonic() - self.changed
