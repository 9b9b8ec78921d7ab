"""Prefect's leases of concurrency slots, kept in files that other members of a storage's group can read and replace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prefect.server.concurrency.lease_storage import filesystem

from grpo_core.system.files import umask


class ConcurrencyLeaseStorage(filesystem.ConcurrencyLeaseStorage):
    """Prefect's own leaves each file to the user alone who wrote it."""

    def _atomic_write_json(self, file_path: Path, data: Any) -> None:
        super()._atomic_write_json(file_path, data)
        file_path.chmod(0o666 & ~umask())
