"""Refuses what this user may not write to, before any work: a storage may belong to one user, or to a group."""

from __future__ import annotations

import grp
import os
import pwd
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from grpo_core.errors import GrpoError
from grpo_core.system.files import umask

SHARED = stat.S_ISGID | stat.S_IWGRP  # mode of a folder in which a group works: what is made there belongs to the group


class AccessError(GrpoError):
    """Raised if this user may not write to a path of the storage, or would write there what its group cannot change;
    the message says whose it is and what to do."""


def check_access(*paths: Path, write: bool = True) -> None:
    """Raises AccessError if this user may not read, or not `write`, one of the paths that exist. Name a folder before
    what is in it."""
    for path in paths:
        asked = os.R_OK | (os.W_OK if write else 0) | (os.X_OK if path.is_dir() else 0)
        if os.access(path, asked):
            continue
        with suppress(FileNotFoundError):  # such as a database's journal, which comes and goes
            status = path.stat()
            raise AccessError(
                f"{path} cannot be {'written to' if write else 'read'} by user "
                f"{_name(pwd.getpwuid, os.geteuid())}: it belongs to user "
                f"{_name(pwd.getpwuid, status.st_uid)} and group {_name(grp.getgrgid, status.st_gid)}, with "
                f"permissions {stat.filemode(status.st_mode)}. Have its owner share the storage with a group of which "
                'you are a member (docs/how-to/servers.md, "Several people on one machine"), or set GRPO_STORAGE to a '
                "folder of your own"
            )


def check_umask(storage: Path) -> None:
    """Raises AccessError if a group works in the storage, and could not change the files that this process makes."""
    if storage.stat().st_mode & SHARED == SHARED and umask() & 0o070:
        raise AccessError(
            f"{storage} is shared by the group {_name(grp.getgrgid, storage.stat().st_gid)}, which could not change "
            f"what is made with the umask {umask():04o}: run `umask 002` first (in a systemd unit: UMask=0002)"
        )


def _name(find: Callable[[int], Any], number: int) -> str:
    with suppress(KeyError):  # as in a container that knows no such user
        return find(number)[0]
    return str(number)
