"""Real users of this system, and commands that they run. Only root can make them."""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from benchmarks.command import ROOT, python_path

GRPO = ("-m", "flows.cli.main")


@contextmanager
def users(*groups: str) -> Iterator[list[str]]:
    """New users, one per name of a group: those with the same name are members of the same new group, those with "" of
    their own alone. Skips the test where no user can be made."""
    if os.geteuid() or not shutil.which("useradd") or not shutil.which("setpriv"):
        pytest.skip("making users takes root, useradd and setpriv")
    if closed := [folder for folder in (ROOT, *ROOT.parents) if not folder.stat().st_mode & stat.S_IXOTH]:
        pytest.skip(f"other users cannot enter {closed[-1]}, in which this checkout lies")
    mark = secrets.token_hex(3)
    with ExitStack() as stack:
        for group in {*groups} - {""}:
            _do("groupadd", f"{group}-{mark}")
            stack.callback(_do, "groupdel", f"{group}-{mark}")
        made = [f"user{number}-{mark}" for number in range(len(groups))]
        for name, group in zip(made, groups, strict=True):
            _do("useradd", "--user-group", *(["--groups", f"{group}-{mark}"] if group else []), name)
            stack.callback(_do, "userdel", name)
        yield made


def run_as(user: str, umask: str, *arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """`grpo` as this user runs it."""
    command = python_as(user, umask, *GRPO, *map(str, arguments))
    return subprocess.run(command, env=seen(environment), capture_output=True, text=True, timeout=1200)


def python_as(user: str, umask: str, *arguments: str) -> list[str]:
    """Command that runs this Python as this user. What leads to it is opened to the user in a mount namespace of the
    command alone."""
    switch = ["setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups", "--inh-caps=-all"]
    command = shlex.join([*switch, sys.executable, *arguments])
    script = f"set -e\n{_opened(Path(sys.executable).resolve())}\numask {umask}\nexec {command}"
    return ["unshare", "--mount", "bash", "-c", script]


def seen(environment: Mapping[str, str]) -> dict[str, str]:
    """Environment of a user with these variables, whose home does not exist."""
    return {**_inherited(), "HOME": "/nonexistent", "PYTHONPATH": python_path(ROOT), **environment}


def _opened(program: Path) -> str:
    """Shell commands after which all users may pass to a program of root's: the folder that they may not enter shows
    the next one on the way alone."""
    closed = next((folder for folder in [*program.parents][::-1] if not folder.stat().st_mode & stat.S_IXOTH), None)
    if closed is None:
        return ""
    there = shlex.quote(str(closed / program.relative_to(closed).parts[0]))
    shown = f"/mnt/{shlex.quote(program.relative_to(closed).parts[0])}"
    mounts = ["-t tmpfs -o mode=755 none /mnt", f"--rbind {there} {shown}", f"--rbind /mnt {shlex.quote(str(closed))}"]
    return f"mount {mounts[0]} && mkdir {shown} && mount {mounts[1]} && mount {mounts[2]}"


def _inherited() -> Mapping[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT", "MLFLOW", "GRPO_"))}


def _do(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
