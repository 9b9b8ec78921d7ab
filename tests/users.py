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
    """Command that runs this Python as this user. What leads to it, and to this checkout, is opened to the user in a
    mount namespace of the command alone."""
    switch = ["setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups", "--inh-caps=-all"]
    command = shlex.join([*switch, sys.executable, *arguments])
    script = (
        f"set -e\n{_opened(Path(sys.executable).resolve(), Path(sys.executable), ROOT)}\numask {umask}\nexec {command}"
    )
    return ["unshare", "--mount", "bash", "-c", script]


def seen(environment: Mapping[str, str]) -> dict[str, str]:
    """Environment of a user with these variables, whose home does not exist."""
    return {**_inherited(), "HOME": "/nonexistent", "PYTHONPATH": python_path(ROOT), **environment}


def _opened(*places: Path) -> str:
    """Shell commands after which all users may pass to these places of root's: a folder that they may not enter shows
    what is next on the way alone."""
    shown: dict[Path, set[str]] = {}
    for place in places:
        closed = next((folder for folder in [*place.parents][::-1] if not folder.stat().st_mode & stat.S_IXOTH), None)
        if closed is not None:
            shown.setdefault(closed, set()).add(place.relative_to(closed).parts[0])
    lines = []
    for closed, names in shown.items():
        lines.append("mount -t tmpfs -o mode=755 none /mnt")
        for name in sorted(names):
            there, here = shlex.quote(str(closed / name)), shlex.quote(f"/mnt/{name}")
            lines += [f"mkdir {here}", f"mount --rbind {there} {here}"]
        lines.append(f"mount --rbind /mnt {shlex.quote(str(closed))}")
    return "\n".join(lines)


def _inherited() -> Mapping[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT", "MLFLOW", "GRPO_"))}


def _do(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
