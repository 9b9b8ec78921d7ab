"""What an input is known by: its content, whatever its name and place."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Any

from grpo_core.config import RunConfig
from grpo_core.rewards.contract import source_of


def content_hash(source: str) -> str:
    """Hash of a file's or folder's content; of the name itself where it is no path (a hub name).

    Of a folder, README.md and hidden files and folders (.cache, .gitattributes) are left out, which no loader reads.
    """
    path = Path(source)
    digest = hashlib.blake2b(digest_size=16)
    if not path.exists():
        digest.update(source.encode())
        return digest.hexdigest()
    files = [path.relative_to(path)] if path.is_file() else sorted(it.relative_to(path) for it in path.rglob("*"))
    for name in files:
        file = path / name
        if not file.is_file() or name.name == "README.md" or any(part.startswith(".") for part in name.parts):
            continue
        status = file.stat()
        digest.update((str(name) if path.is_dir() else path.suffix).encode())  # which says how to read it
        digest.update(_file_hash(file, status.st_size, status.st_mtime_ns))
    return digest.hexdigest()


@functools.lru_cache(maxsize=4096)
def _file_hash(file: Path, size: int, modified_ns: int) -> bytes:
    """Hash of one file; size and time of modification make the cache forget a file that was written again."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "blake2b").digest()


def reward_parts(config: RunConfig) -> list[dict[str, Any]]:
    """What scores follow from: each reward's determining keys and the hash of its source; a classifier's model is known
    by its content."""
    parts: list[dict[str, Any]] = config.determining()["rewards"]
    for part, reward in zip(parts, config.rewards, strict=True):
        part["source"] = hashlib.blake2b(source_of(reward)).hexdigest()
        if reward.function == "classifier" and "model" in part["args"]:
            part["args"]["model"] = content_hash(part["args"]["model"])
    return parts
