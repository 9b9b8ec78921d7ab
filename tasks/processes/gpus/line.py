"""The line of the stages that share GPU slots: a file in the storage's folder `line` for each that waits or holds some.

The process keeps its file locked: when it dies, its place is free. A file's name is the stage's place in the order,
its content the run's name.
"""

from __future__ import annotations

import fcntl
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tasks.stages.run_directory import storage_root

FOLDER, WAITS, HOLDS = "line", ".waits", ".holds"
HIGHEST = 100  # launch.priority


@dataclass(frozen=True)
class Line:
    """Runs of the stages that go before one that waits, the first of them first, and runs of those that hold slots."""

    before: list[str]
    holders: list[str]


class Place:
    """A stage's place in the line."""

    def __init__(self, run: str):
        folder = storage_root() / FOLDER
        folder.mkdir(exist_ok=True)
        self.id = uuid.uuid4().hex
        self.path = folder / self.id  # which no stage reads
        self.file = self.path.open("x")
        fcntl.flock(self.file, fcntl.LOCK_EX)
        self.file.write(run)
        self.file.flush()

    def wait(self, is_training: bool, priority: int, since: float) -> None:
        """Wait in the line: evaluations, which are short, before trainings; then the higher priority; then whichever
        has waited longer (`since`: in seconds since the epoch)."""
        self._rename(f"{int(is_training)}-{HIGHEST - priority:03d}-{since:014.3f}-{self.id}{WAITS}")

    def hold(self) -> None:
        """Hold slots from now on, and wait no longer."""
        self._rename(self.path.with_suffix(HOLDS).name)

    def leave(self) -> None:
        """Leave the line."""
        self.path.unlink(missing_ok=True)
        self.file.close()

    def look(self) -> Line:
        """Return the line as this stage sees it."""
        before, holders = list[str](), list[str]()
        for path in sorted(self.path.parent.iterdir()):
            listed = holders if path.suffix == HOLDS else before if path.suffix == WAITS and path < self.path else None
            if listed is not None and path != self.path and (run := _run_in(path)):
                listed.append(run)
        return Line(before, holders)

    def _rename(self, name: str) -> None:
        self.path = self.path.rename(self.path.with_name(name))


def _run_in(path: Path) -> str | None:
    """Return the run whose stage keeps this file locked; remove the file if its process has died."""
    with suppress(FileNotFoundError), path.open() as file:  # it may have another name by now
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return file.read()
        path.unlink(missing_ok=True)
    return None
