"""Identity of inputs: a hash of their content, whatever their name and place."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Any

from grpo_core.config.files import RunConfig
from grpo_core.rewards.contract import source_of


def content_hash(source: str) -> str:
    """Hash of a file's or folder's content; of the name itself if it is no path (a hub name).

    In a folder, README.md and hidden files and folders (.cache, .gitattributes) do not count: no loader reads them.
    """
    path = Path(source)
    digest = hashlib.blake2b(digest_size=16)
    if not path.exists():
        digest.update(source.encode())
        return digest.hexdigest()
    # A file's suffix says how to read it, a name inside a folder what it is.
    files = {path.suffix: path} if path.is_file() else {str(it.relative_to(path)): it for it in _files_read(path)}
    for name, file in files.items():
        status = file.stat()
        digest.update(name.encode())
        digest.update(_file_hash(file, status.st_size, status.st_mtime_ns))
    return digest.hexdigest()


def _files_read(folder: Path) -> list[Path]:
    found = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "README.md")
    return [path for path in found if not any(part.startswith(".") for part in path.relative_to(folder).parts)]


@functools.lru_cache(maxsize=4096)
def _file_hash(file: Path, size: int, modified_ns: int) -> bytes:
    """Hash of one file; size and time of modification make the cache forget a file that was written again."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "blake2b").digest()


def reward_parts(config: RunConfig) -> list[dict[str, Any]]:
    """What scores follow from: each reward's determining keys and the hash of its source; for a classifier's model, the
    hash of its content."""
    parts: list[dict[str, Any]] = config.determining()["rewards"]
    for part, reward in zip(parts, config.rewards, strict=True):
        part["source"] = hashlib.blake2b(source_of(reward)).hexdigest()
        if reward.function == "classifier" and "model" in part["args"]:
            part["args"]["model"] = content_hash(part["args"]["model"])
    return parts
