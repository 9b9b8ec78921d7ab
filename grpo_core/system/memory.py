"""Memory of this machine that is still free, also in a container or a batch job with a limit of its own."""

from __future__ import annotations

from pathlib import Path

import psutil

GROUPS = Path("/proc/self/cgroup")  # a line per hierarchy: number, controllers, path
MOUNTED = Path("/sys/fs/cgroup")


def available_memory() -> int:
    """Bytes that can be taken before the machine, or a control group of this process, runs out. What the system keeps
    of files that were not used lately counts as free."""
    return min([psutil.virtual_memory().available, *_left_in_groups()])


def _left_in_groups() -> list[int]:
    """Bytes left under each limit on this process's control groups, of versions 1 and 2, and on those around them."""
    left = []
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
        left += [found for folder in around if (found := _left(folder, *names)) is not None]
    return left


def _left(group: Path, limit: str, used: str, unused_files: str) -> int | None:
    """Bytes left in one group; None if it has no limit."""
    try:
        most, taken = (group / limit).read_text().strip(), int((group / used).read_text())
        statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except OSError:
        return None
    return None if most == "max" else max(int(most) - taken + int(statistics.get(unused_files, 0)), 0)
