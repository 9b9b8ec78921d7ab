"""`python -m tasks.processes.scheduled FOLDER`: one machine of a scheduler's job.

The machine takes part in a training through FOLDER, which the stage has made on the shared disk
(`tasks.processes.launchers.batch` lists its files). This process answers the start check, waits for its request and
becomes the parent of a supervised `tasks.processes.ranks`. If the stage gives no sign of life for SILENCE_SECONDS,
everything here is killed. On SIGTERM, sent for a pre-emption or the end of the time limit, the processes save and end.
The exit status is theirs.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from grpo_core.system.descendants import KILL_SECONDS
from tasks.processes import ranks
from tasks.processes.machine import check, supervised
from tasks.processes.run import SIGNALLED, TOLD
from tasks.processes.signs_of_life import BEAT_SECONDS, POLL_SECONDS, SILENCE_SECONDS, Signs
from tasks.stages.files import write_text

NUMBERS = ("SLURM_NODEID", "JOB_COMPLETION_INDEX")  # each scheduler's variable with this machine's number
OUTSIDE = "192.0.2.1"  # belongs to no machine (RFC 5737): traffic there takes the interface that leads outside


class Member:
    """This machine's side of the folder."""

    def __init__(self, folder: Path, number: int):
        self.folder, self.number = folder, number
        self.told, self.said, self.beats, self.next_beat = False, False, 0, 0.0
        signal.signal(signal.SIGTERM, self._stop)

    def _stop(self, signal_number: int, frame: object) -> None:
        self.told = True

    def file(self, name: str) -> Path:
        return self.folder / f"{self.number}.{name}"

    def beat(self, status: int | None = None) -> None:
        """Give a sign of life, if one is due; the first after SIGTERM says so, the last has the exit status."""
        if status is None and time.monotonic() < self.next_beat and self.said == self.told:
            return
        self.next_beat, self.said = time.monotonic() + BEAT_SECONDS, self.told
        self.beats += 1
        sign = {"beats": self.beats, "told": self.said, "status": status}
        with suppress(OSError):
            write_text(self.file("machine"), json.dumps(sign))

    def take_part(self) -> int:
        """Answer the check, wait for the request, and run it to its end. Returns the exit status."""
        self.file("output").touch()
        answer = check({"file": str(self.folder)}) | {"name": own_name(), "address": own_address()}
        self.beat()
        write_text(self.file("answer"), json.dumps(answer))
        request = self._request()
        return TOLD if request is None else self._run(request)

    def _request(self) -> dict[str, Any] | None:
        """Wait for the request to this machine; None if it is told to stop first. Removes the file, which holds the
        environment with its secrets."""
        stage, file = Signs(self.folder / "stage"), self.file("request")
        while not file.exists():
            if self.told:
                return None
            stage.read()
            if stage.silence() > SILENCE_SECONDS:
                sys.exit(f"no sign of life from the stage in {self.folder} for {SILENCE_SECONDS:g} s")
            self.beat()
            time.sleep(POLL_SECONDS)
        request = json.loads(file.read_bytes())
        file.unlink()
        return dict(request)

    def _run(self, request: dict[str, Any]) -> int:
        process = subprocess.Popen(
            supervised(request, SILENCE_SECONDS),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **request["environment"]},
        )
        assert process.stdin is not None and process.stdout is not None
        copier = threading.Thread(target=copy, args=(process.stdout, self.file("output")), daemon=True)
        copier.start()
        stage = Signs(self.file("stage"))
        while (code := process.poll()) is None:
            heard = stage.read()
            with suppress(OSError):  # it has ended
                if self.told or stage.content.get("stop"):
                    process.stdin.close()
                elif heard:
                    process.stdin.write(b"\n")
                    process.stdin.flush()
            self.beat()
            time.sleep(POLL_SECONDS)
        copier.join(KILL_SECONDS)  # a process that SIGKILL cannot end keeps the output open
        return code if code >= 0 else SIGNALLED - code


def copy(output: IO[bytes], file: Path) -> None:
    """Copy the processes' output into the file, flushing it each time, since other machines read it meanwhile."""
    with file.open("ab", buffering=0) as copied:
        while part := os.read(output.fileno(), 1 << 16):
            with suppress(OSError):  # a full disk must not block the processes
                copied.write(part)
                os.fsync(copied.fileno())


def own_number() -> int:
    """This machine's number in its job, from 0."""
    for name in NUMBERS:
        if name in os.environ:
            return int(os.environ[name])
    sys.exit(f"none of {', '.join(NUMBERS)} is set: this command runs in a scheduler's job only")


def own_name() -> str:
    """This machine's name, as the scheduler knows it."""
    return os.environ.get("SLURMD_NODENAME", socket.gethostname())


def own_address() -> str:
    """Address at which other machines reach this one: that of its name or, if that is a loopback address, that of the
    interface that leads outside."""
    with suppress(OSError):
        address = socket.gethostbyname(socket.gethostname())
        if not address.startswith("127."):
            return address
    return str(ranks.own_address(OUTSIDE) or "127.0.0.1")


def main() -> None:
    folder, number = Path(sys.argv[1]), own_number()
    if not folder.is_dir():
        sys.exit(
            f"machine {number} does not see {folder}: put the storage root (GRPO_STORAGE) on a disk that all machines "
            "share, under the same path. If the folder has been removed, the stage has ended"
        )
    member = Member(folder, number)
    status = member.take_part()
    member.beat(status)
    sys.exit(status)


if __name__ == "__main__":
    main()
