"""Files that survive a power cut: the content is on the disk before the rename, and the new name after it.

Otherwise a file that was renamed in the last seconds may be empty afterwards, and the one that it replaced gone.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def publish(partial: Path, final: Path) -> None:
    """Rename a finished file or folder to its final name in the same folder, so that it survives a power cut.

    A file of that name is replaced. A folder of that name has to be moved away first. Its files get the permissions
    that the umask leaves: safetensors makes files that only their owner can read.
    """
    with naming(final):
        _unlock(partial)
        sync_to_disk(partial)
        partial.rename(final)
        _sync(final.parent)


def replace_folder(partial: Path, final: Path) -> None:
    """Publish a folder in place of one that may exist, which is `final` with the suffix .old in between."""
    replaced = final.with_suffix(".old")
    if final.exists():
        shutil.rmtree(replaced, ignore_errors=True)  # of a process that was killed after it had published
        final.rename(replaced)
    publish(partial, final)
    shutil.rmtree(replaced, ignore_errors=True)


def sync_to_disk(path: Path) -> None:
    """Wait until a file, or a folder with everything in it, is on the disk.

    Files that another process renames meanwhile are left to that process.
    """
    if path.is_dir():
        for child in path.iterdir():
            if not child.is_symlink():  # the target of a link is not part of this folder
                with suppress(FileNotFoundError):
                    sync_to_disk(child)
    _sync(path)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Raise an OSError in the block as one that names `path`, unless it names a file; also the OSError of a full disk
    behind the RuntimeError that torch makes of it."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__context__
        if cause is None:
            raise
        if cause.errno is None:  # it has a text only
            raise OSError(f"{cause}: {path}") from None
        raise OSError(cause.errno, cause.strerror, cause.filename or str(path)) from None


def umask() -> int:
    """This process's umask. `os.umask` would have to change it for a moment, for all threads."""
    [mask] = re.findall(r"^Umask:\s*(\d+)", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(mask, 8)


def _unlock(path: Path) -> None:
    """Give this user's files that are closed to all others the permissions that the umask leaves."""
    mine, kept = os.geteuid(), 0o666 & ~umask()
    for file in path.rglob("*") if path.is_dir() else [path]:
        with suppress(FileNotFoundError):  # renamed meanwhile by another process
            found = file.lstat()
            if stat.S_ISREG(found.st_mode) and found.st_uid == mine and not found.st_mode & 0o077:
                file.chmod(kept)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems sync no folders
            raise
    finally:
        os.close(descriptor)
