"""Files that survive a power cut: what is renamed into place is on the disk first, and so is the new name afterwards.

Without that a file renamed in the last seconds may be found empty, and what it replaced is gone.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path


def publish(partial: Path, final: Path) -> None:
    """Rename a whole file or folder to its final name, in the same folder; afterwards it is there for good.

    A file of that name is replaced. A folder of that name has to be moved away before.
    """
    sync_to_disk(partial)
    partial.rename(final)
    _sync(final.parent)


def sync_to_disk(path: Path) -> None:
    """Wait until a file, or a folder with everything in it, is on the disk.

    What another process writes there meanwhile, by a name that it then replaces, is left to that process.
    """
    if path.is_dir():
        for child in path.iterdir():
            if not child.is_symlink():  # what a link names is not this folder's
                with suppress(FileNotFoundError):
                    sync_to_disk(child)
    _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems sync no folders
            raise
    finally:
        os.close(descriptor)
