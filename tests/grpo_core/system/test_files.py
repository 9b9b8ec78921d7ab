"""What is published is on the disk, file by file, before it takes its name, and its name after that."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from grpo_core.system.files import naming, publish
from tests.grpo_core.training.disk import Disk


def _folder(path: Path) -> Path:
    (path / "inner").mkdir(parents=True)
    (path / "first").write_text("1")
    (path / "inner" / "second").write_text("2")
    (path / "link").symlink_to("nothing")
    return path


def test_a_folder_is_on_the_disk_with_all_that_is_in_it_before_it_takes_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    partial, final = _folder(tmp_path / "partial"), tmp_path / "final"
    done: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def noted_fsync(descriptor: int) -> None:
        done.append(str(Path(f"/proc/self/fd/{descriptor}").readlink().relative_to(tmp_path)))
        fsync(descriptor)

    def noted_rename(source: Path, target: Path) -> Path:
        done.append("rename")
        return rename(source, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(Path, "rename", noted_rename)
    publish(partial, final)
    assert sorted(done[:4]) == ["partial", "partial/first", "partial/inner", "partial/inner/second"]
    assert done[4:] == ["rename", "."]
    assert (final / "inner" / "second").read_text() == "2"


def test_a_file_that_another_process_renames_meanwhile_is_left_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    partial, final = _folder(tmp_path / "partial"), tmp_path / "final"
    (partial / "sent.tmp").write_text("3")
    opened = os.open

    def renamed_before(path: Path, *flags: int) -> int:
        if Path(path).name == "sent.tmp":
            Path(path).rename(partial / "sent")
        return opened(path, *flags)

    monkeypatch.setattr(os, "open", renamed_before)
    publish(partial, final)
    assert (final / "sent").read_text() == "3"


def test_a_file_is_replaced_and_a_write_after_its_sync_is_not_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch)
    partial, final = tmp_path / "partial", tmp_path / "final"
    final.write_text("old")
    partial.write_text("new")
    publish(partial, final)
    assert final.read_text() == "new"
    assert disk.holds(final)
    final.write_text("newer")
    assert not disk.holds(final)


def test_a_file_system_that_syncs_no_folders_is_written_to_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync = os.fsync

    def files_only(descriptor: int) -> None:
        if Path(f"/proc/self/fd/{descriptor}").is_dir():
            raise OSError(errno.EINVAL, "Invalid argument")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", files_only)
    publish(_folder(tmp_path / "partial"), tmp_path / "final")
    assert (tmp_path / "final" / "first").read_text() == "1"


def test_a_failing_disk_is_an_error_and_nothing_takes_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(OSError, match="Input/output"):
        publish(_folder(tmp_path / "partial"), tmp_path / "final")
    assert not (tmp_path / "final").exists()


def test_an_error_of_the_disk_is_raised_with_a_file_s_name_whatever_a_library_makes_of_it(tmp_path: Path) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(OSError, match="No space left on device: '/the/file'"), naming(Path("/the/file")):
        raise full
    with pytest.raises(OSError, match="No space left on device: '/the/file'"), naming(Path("/the/file")):
        try:
            raise full
        except OSError:
            raise RuntimeError("unexpected pos 704 vs 598") from None
    with pytest.raises(OSError, match="No space left on device: '/another'"), naming(Path("/the/file")):
        raise OSError(errno.ENOSPC, "No space left on device", "/another")
    with pytest.raises(OSError, match="the share's quota: /the/file"), naming(Path("/the/file")):
        raise OSError("the share's quota")
    with pytest.raises(RuntimeError, match="something else"), naming(Path("/the/file")):
        raise RuntimeError("something else")
