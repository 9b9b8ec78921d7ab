"""A disk that is full when a test wants it to be."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[None]:
    """A disk of this size in this place until the body ends; skips the test where none can be mounted."""
    folder.mkdir(parents=True, exist_ok=True)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"a small disk is a tmpfs, which this user may not mount: {mounted.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path, left_free: int = 0) -> Path:
    """The file that takes all of the disk but `left_free` bytes."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(4096)):
            pass
    os.truncate(filler, filler.stat().st_size - left_free)
    return filler
