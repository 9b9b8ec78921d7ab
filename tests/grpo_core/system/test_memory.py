"""Free memory of the machine, and of control groups as the kernel shows them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from grpo_core.system import memory

FREE = 1000  # bytes of the machine


def _group(folder: Path, names: tuple[str, str, str], limit: str, used: int, unused_files: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{names[2]} {unused_files}\n")


FIRST = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
SECOND = ("memory.max", "memory.current", "inactive_file")


@pytest.mark.parametrize(
    ("line", "groups", "expected"),
    [
        ("0::/", {}, FREE),
        ("0::/job/step", {"job/step": (SECOND, "max", 10, 0)}, FREE),
        ("0::/job/step", {"job/step": (SECOND, "700", 300, 50)}, 450),
        ("0::/job/step", {"job": (SECOND, "400", 300, 50), "job/step": (SECOND, "700", 300, 50)}, 150),
        ("0::/elsewhere", {"": (SECOND, "400", 300, 0), "job": (SECOND, "1", 0, 0)}, 100),
        ("4:memory:/job", {"memory/job": (FIRST, "600", 300, 20)}, 320),
        ("4:cpu,memory:/of/the/host", {"memory": (FIRST, "500", 510, 0)}, 0),
        ("4:memory:/job", {"memory/job": (FIRST, "9223372036854771712", 300, 20)}, FREE),
        ("3:cpuset:/job", {"memory/job": (FIRST, "1", 0, 0)}, FREE),
    ],
)
def test_free_memory_is_that_of_the_machine_or_what_the_narrowest_control_group_leaves(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    line: str,
    groups: dict[str, tuple[tuple[str, str, str], str, int, int]],
    expected: int,
) -> None:
    for name, group in groups.items():
        _group(tmp_path / "mounted" / name, *group)
    (tmp_path / "cgroup").write_text(f"{line}\n")
    monkeypatch.setattr(memory, "GROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(memory, "MOUNTED", tmp_path / "mounted")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=FREE))
    assert memory.available_memory() == expected


def test_a_system_without_control_groups_has_the_memory_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "GROUPS", tmp_path / "none")
    assert 0 < memory.available_memory() <= psutil.virtual_memory().total
