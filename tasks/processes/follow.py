"""`python -m tasks.processes.follow FOLDER NUMBER ARGUMENTS…`: represent machine NUMBER of a scheduler's job.

This process asks the machine to run `python ARGUMENTS`, gives it signs of life, and prints what the processes there
print. On SIGTERM it tells the machine to stop: the processes there save and end. It does the same when another machine
of the job is told to stop, since processes save together. The exit status is theirs, or LOST if the machine gives no
sign of life for SILENCE_SECONDS: then this process stops its own signs and returns only when everything there must have
ended, so that no two attempts at a training run concurrently.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

from tasks.processes.machine import shared_environment
from tasks.processes.run import LOST
from tasks.processes.signs_of_life import BEAT_SECONDS, ENDING_SECONDS, POLL_SECONDS, SILENCE_SECONDS, Signs
from tasks.stages.files import write_text

TOLD_FILE = "told"


def main() -> None:
    told: list[int] = []  # signals
    signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
    folder, number, arguments = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
    request = {"environment": shared_environment(), "arguments": arguments}
    write_text(folder / f"{number}.request", json.dumps(request))
    machine, output = Signs(folder / f"{number}.machine"), folder / f"{number}.output"
    shown, beats, next_beat, stop, said = 0, 0, 0.0, False, False
    while machine.read() or machine.silence() < SILENCE_SECONDS:
        status = machine.content.get("status")
        if machine.content.get("told"):
            with suppress(OSError):  # retried at the next look
                (folder / TOLD_FILE).touch()
        stop = stop or bool(told) or (folder / TOLD_FILE).exists()
        shown = print_from(output, shown)
        if status is not None:
            sys.exit(status)
        if time.monotonic() >= next_beat or stop > said:
            beats, next_beat, said = beats + 1, time.monotonic() + BEAT_SECONDS, stop
            with suppress(OSError):  # the next sign may arrive
                write_text(folder / f"{number}.stage", json.dumps({"beats": beats, "stop": stop}))
        time.sleep(POLL_SECONDS)
    print(
        f"no sign of life for {SILENCE_SECONDS:g} s; waiting {ENDING_SECONDS:g} s until no process can be left there",
        flush=True,
    )
    time.sleep(ENDING_SECONDS)
    sys.exit(LOST)


def print_from(output: Path, start: int) -> int:
    """Print the file's bytes from `start` on, and return its length. Opens the file each time, as NFS requires."""
    with suppress(OSError), output.open("rb") as file:
        file.seek(start)
        sys.stdout.buffer.write(new := file.read())
        sys.stdout.buffer.flush()
        return start + len(new)
    return start


if __name__ == "__main__":
    main()
