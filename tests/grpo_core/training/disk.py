"""What a power cut would leave, as far as a program can know it: what was synced, under the name it had then."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest


class Disk:
    """Follows os.fsync: a file is on the disk as it was when it was synced, a folder with the names it had then."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.synced: dict[int, Any] = {}  # by inode
        fsync = os.fsync

        def noting(descriptor: int) -> None:
            fsync(descriptor)
            path = Path(f"/proc/self/fd/{descriptor}").resolve()
            self.synced[path.stat().st_ino] = _content(path)

        monkeypatch.setattr(os, "fsync", noting)

    def holds(self, path: Path) -> bool:
        """The file, or the folder with all that is in it, as it is, under its name."""
        names = self.synced.get(path.parent.stat().st_ino, frozenset())
        named = (path.name, path.stat().st_ino) in names
        return named and all(self.synced.get(p.stat().st_ino) == _content(p) for p in [path, *path.rglob("*")])


def _content(path: Path) -> Any:
    if path.is_dir():
        return frozenset((child.name, child.stat().st_ino) for child in path.iterdir())
    return path.read_bytes()
