"""What vLLM leaves on a machine when it is killed: shared memory, and sockets in the temporary folder."""

from __future__ import annotations

import os
import re
import tempfile
from contextlib import suppress
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
SEGMENT = re.compile(r"psm_[0-9a-f]+|nccl-\w+|.*-cpushm-.*")
SOCKET = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def leftovers(before: float) -> list[Path]:
    """Segments of shared memory and sockets of this user that have not changed since `before`, in seconds since 1970,
    and that no process of this machine uses."""
    segments = [it for it in SHARED_MEMORY.glob("*") if SEGMENT.fullmatch(it.name)]
    sockets = [it for it in Path(tempfile.gettempdir()).iterdir() if SOCKET.fullmatch(it.name) and it.is_socket()]
    old = []
    for path in [*segments, *sockets]:
        with suppress(FileNotFoundError):
            if (stat := path.stat()).st_uid == os.getuid() and stat.st_mtime < before:
                old.append(path)
    used = _used() if old else ""
    return [path for path in old if f"{path}\n" not in used]


def _used() -> str:
    """Paths that processes have mapped and sockets that they have open, each at the end of a line."""
    texts = [Path("/proc/net/unix").read_text()]
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):  # it has ended, or is another user's, who cannot use files of this one
            texts.append(maps.read_text())
    return "".join(texts)
