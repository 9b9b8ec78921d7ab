"""The tokens per pass that a training of a sharded model ran out of memory with, for its next start."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from grpo_core.system.files import publish

FILE = "tokens_per_pass"  # of a training's output


def write_limit(output: Path, tokens: int) -> None:
    """Let the next start of the training use at most that many tokens per pass. Several processes may call it."""
    temporary = output / f"{FILE}.{socket.gethostname()}-{os.getpid()}.tmp"
    temporary.write_text(str(min(tokens, read_limit(output) or tokens)))
    publish(temporary, output / FILE)


def read_limit(output: Path) -> int | None:
    """Return what `write_limit` wrote; None if memory has not run out."""
    file = output / FILE
    return int(file.read_text()) if file.exists() else None
