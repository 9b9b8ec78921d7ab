"""Commands as a person types them, each to its end."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

SECONDS = 1200


def run(command: Sequence[str | Path], folder: Path, environment: Mapping[str, str]) -> str:
    """What a command prints, errors included. AssertionError if it fails."""
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout
