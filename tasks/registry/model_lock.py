"""The lock of a registered model: across all machines that share the storage, one process at a time moves its
aliases."""

from __future__ import annotations

import fcntl
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

from tasks.stages.run_directory import storage_root


@contextmanager
def model_lock(name: str) -> Iterator[None]:
    """Wait for the model's lock and hold it. The work under it takes seconds."""
    folder = storage_root() / "models"
    folder.mkdir(parents=True, exist_ok=True)
    # A model's name may be too long for a file name.
    with (folder / f"{name[:40]}-{hashlib.sha256(name.encode()).hexdigest()[:16]}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
