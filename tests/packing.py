"""What is tracked of this project, as a folder of its own: where a test can build it without leaving anything here."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]


def copy_of_the_source(folder: Path) -> Path:
    """A copy of the tracked files, links included."""
    folder.mkdir()
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    archive = ["tar", "--null", "--files-from=-", "--create", "--file=-"]
    packed = subprocess.run(archive, cwd=ROOT, input=tracked, capture_output=True, check=True).stdout
    subprocess.run(["tar", "--extract", "--file=-"], cwd=folder, input=packed, check=True)
    return folder
