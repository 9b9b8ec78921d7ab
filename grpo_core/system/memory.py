"""Memory of this machine, also in a container or a batch job with a limit of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil

GIB = 2**30
ALLOCATOR = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}  # environment variables that set up torch's allocator
GROUPS = Path("/proc/self/cgroup")  # a line per hierarchy: number, controllers, path
MOUNTED = Path("/sys/fs/cgroup")


def available_memory() -> int:
    """Bytes that can be taken before the machine, or a control group of this process, runs out. Cached files that were
    not used lately count as free."""
    return min([psutil.virtual_memory().available, *(max(limit - used, 0) for limit, used in _control_groups())])


def memory_limit() -> int:
    """Bytes that this process and all others of its machine or control group may take together."""
    return min([psutil.virtual_memory().total, *(limit for limit, _ in _control_groups())])


def gib_text(gib: float) -> str:
    """A size in GiB as a person reads it: "23.4 GiB", or "512.0 MiB" below one."""
    return f"{gib:.1f} GiB" if gib >= 1 else f"{1024 * gib:.1f} MiB"


def _control_groups() -> Iterator[tuple[int, int]]:
    """Limit and bytes in use of this process's control groups, of versions 1 and 2, and of those around them."""
    for line in GROUPS.read_text().splitlines() if GROUPS.exists() else []:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, names = MOUNTED, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root, names = MOUNTED / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        group = root / path.strip("/")
        # In a container, the path may be that on its host, and only the root is there.
        around = [folder for folder in [group, *group.parents] if folder.is_relative_to(root)]
        yield from (found for folder in around if (found := _group_limit(folder, *names)) is not None)


def _group_limit(group: Path, limit: str, used: str, unused_files: str) -> tuple[int, int] | None:
    """Limit of one group, and bytes in use without unused files; None if it has no limit."""
    try:
        maximum, taken = (group / limit).read_text().strip(), int((group / used).read_text())
        statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except OSError:
        return None
    return None if maximum == "max" else (int(maximum), taken - int(statistics.get(unused_files, 0)))
