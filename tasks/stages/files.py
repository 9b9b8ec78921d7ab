"""Files in a run's directory: written completely or not at all, and kept when replaced."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from grpo_core.system.files import publish
from grpo_core.system.memory import gib_text

WEIGHTS = ".safetensors"
ROOM = 2**20  # bytes that a database needs for its next transactions


def write_text(path: Path, text: str) -> None:
    """Write the file completely or not at all, even if the process or the machine dies."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text)
    publish(temporary, path)


def read_json(path: Path) -> dict[str, Any]:
    """Read the JSON object in a file; empty if the file is missing or damaged."""
    try:
        found = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def is_full(error: BaseException) -> bool:
    """Return whether SQLite, or a server in whose message it is quoted, says that the disk is full."""
    return "database or disk is full" in str(error)


def has_room(folder: Path) -> bool:
    """Return whether ROOM bytes can be written there; quotas count too."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(ROOM))
    except OSError:
        return False
    return True


def cannot_grow(database: Path) -> str:
    """Return a sentence that names a database whose disk is full, its size, and what to do."""
    size = gib_text(database.stat().st_size / 2**30) if database.exists() else "not made yet"
    return (
        f"the disk of the database {database} ({size}) is full: make room there, then run the same again; what is done "
        "is kept"
    )


def set_aside(path: Path, key: str) -> None:
    """Move an output to replaced/NAME-KEY; if that exists, to replaced/NAME-KEY-2 and so on."""
    if not path.exists():
        return
    folder = path.parent / "replaced"
    folder.mkdir(exist_ok=True)
    kept = f"{path.name}-{key[:12]}"
    names = itertools.chain([kept], (f"{kept}-{number}" for number in itertools.count(2)))
    path.rename(next(folder / name for name in names if not (folder / name).exists()))


def remove(path: Path) -> None:
    """Delete a file, a link or a folder, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def link(source: Path | str, target: Path | str) -> None:
    """Link a weights file if the file system allows it, otherwise copy it; copy any other file."""
    if str(source).endswith(WEIGHTS):
        try:
            Path(source).chmod(0o444)  # a write to one name would change both
            os.link(source, target)
        except OSError:  # another user's file, another file system, or one without links
            pass
        else:
            return
    shutil.copy2(source, target)
