"""This project's own files, and a copy of them: where a test can build it without leaving anything here."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def source_files(*patterns: str) -> list[str]:
    """All files that match and that .gitignore leaves: by an empty repository, since this folder may come without its
    own, or belong to another user, which git refuses."""
    with tempfile.TemporaryDirectory() as empty:
        subprocess.run(["git", "init", "--quiet", empty], check=True)
        git = ["git", f"--git-dir={empty}/.git", f"--work-tree={ROOT}"]
        listed = [*git, "ls-files", "-z", "--others", "--exclude-standard", *patterns]
        done = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.split("\0")[:-1]


def copy_of_the_source(folder: Path) -> Path:
    """A copy of the project's files, links included."""
    folder.mkdir()
    names = "\0".join(source_files())
    archive = ["tar", "--null", "--files-from=-", "--create", "--file=-"]
    packed = subprocess.run(archive, cwd=ROOT, input=names.encode(), capture_output=True, check=True).stdout
    subprocess.run(["tar", "--extract", "--file=-"], cwd=folder, input=packed, check=True)
    return folder
