"""A supervisor's part in noticing hangs: when the stage asks, its processes write their Python stacks."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from grpo_core.system.descendants import running_descendants
from grpo_core.system.progress import DUMP_SIGNAL, read_records

WATCHED = "GRPO_WATCHED"  # environment variable with the folder of the processes' records
HANG = "hang.txt"  # in that folder: empty, or the reason why the training is being ended
POLL_SECONDS = 1.0


def write_stacks_when_asked() -> None:
    """Start a thread that waits until HANG has content, and then makes each process that this one supervises write its
    stacks."""
    if folder := os.environ.get(WATCHED):
        threading.Thread(target=_wait, args=(Path(folder),), daemon=True).start()


def _wait(folder: Path) -> None:
    # The file exists from the start, since another machine would see a new file only a minute later.
    asked = ""
    while not asked:
        time.sleep(POLL_SECONDS)
        with suppress(OSError):
            asked = (folder / HANG).read_text()
    own = {process.pid for process in running_descendants()}
    for record in read_records(folder):
        if record.is_here and record.pid in own:
            header = f"{datetime.now():%Y-%m-%d %H:%M:%S} {record.name}, process {record.pid}, in {record.doing}\n"
            with suppress(OSError):
                with (folder / f"{record.rank}.stacks").open("a") as stacks:
                    stacks.write(header)
                os.kill(record.pid, DUMP_SIGNAL)
                os.kill(record.pid, signal.SIGCONT)  # a stopped process writes nothing
