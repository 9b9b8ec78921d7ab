"""One storage for the members of a group, who are users of this system."""

from __future__ import annotations

import itertools
import json
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from tests.conftest import make_model, write_config
from tests.serving import free_ports
from tests.users import GRPO, python_as, run_as, seen, users

pytestmark = pytest.mark.served


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that every user may enter, with inputs of a run."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        make_model(folder / "model")
        for file in (folder / "model").iterdir():
            file.chmod(0o644)  # safetensors' are their owner's alone
        write_config(folder, folder / "model", max_steps=2, save_steps=1)
        yield folder


def share(folder: Path, user: str, group: str) -> Path:
    """A storage as docs/how-to/servers.md has it set up."""
    (storage := folder / "storage").mkdir()
    shutil.chown(storage, user, group)
    storage.chmod(0o2770)
    return storage


def test_who_may_not_write_to_a_storage_is_told_so_in_one_sentence_before_any_work(folder: Path) -> None:
    with users("team", "team", "") as (first, second, other):
        storage = share(folder, first, _group(second))
        run, status = ["run", folder / "config.toml"], ["status", "test"]
        owned, shared = f"it belongs to user {first} and group", f"{storage} is shared by the group {_group(second)}, "
        for user, umask, command, sentence in [
            (other, "002", run, f"{storage} cannot be written to by user {other}: {owned}"),
            (other, "002", status, f"{storage} cannot be read by user {other}: {owned}"),
            (second, "022", run, f"{shared}which could not change what is made with the umask 0022"),
            (second, "077", run, "run `umask 002` first"),
        ]:
            done = run_as(user, umask, *command, GRPO_STORAGE=str(storage))
            assert (done.returncode, done.stderr.count(sentence)) == (2, 1), done.stderr
            assert len(done.stderr.splitlines()) == 1
        assert not [*storage.iterdir()]
        storage.chmod(0o777)  # no setgid, as without the page
        made = storage / "runs" / "test"
        made.mkdir(parents=True)
        (made / "config.toml").write_text((folder / "config.toml").read_text())
        for path in (storage / "runs", made, made / "config.toml"):
            shutil.chown(path, first, first)
        for command in (["stage", "validate", "--run", "test"], run):
            done = run_as(second, "002", *command, GRPO_STORAGE=str(storage))
            assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
            assert f" cannot be written to by user {second}: {owned}" in done.stderr


@pytest.mark.e2e
def test_who_neither_owns_the_packages_nor_serves_first_serves_with_pages() -> None:
    """Prefect writes its pages into its package, and a runner's folder beside those of all users."""
    with tempfile.TemporaryDirectory() as name, users("team") as (user,):
        Path(name).chmod(0o755)
        storage = share(Path(name), user, _group(user))
        (temporary := Path(name, "tmp")).mkdir()
        temporary.chmod(0o1777)
        (temporary / "runner_storage").mkdir()  # root's, as Prefect makes it
        prefect, mlflow = free_ports(2)
        command = [*GRPO, "up", "--prefect-port", str(prefect), "--mlflow-port", str(mlflow)]
        environment = seen({"GRPO_STORAGE": str(storage), "TMPDIR": str(temporary)})
        up = subprocess.Popen(
            python_as(user, "002", *command),
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            assert up.stdout is not None
            said = list(itertools.takewhile(lambda line: not line.startswith("Ready"), up.stdout))
            assert up.poll() is None, "".join(said)
            assert "<html" in httpx2.get(f"http://127.0.0.1:{prefect}/", follow_redirects=True).raise_for_status().text
        finally:
            up.terminate()
            up.communicate()


@pytest.mark.e2e
def test_members_of_a_group_continue_and_repeat_each_others_runs(folder: Path) -> None:
    with users("team", "team") as (first, second):
        storage = share(folder, first, _group(second))
        for user, command in [
            (first, ["run", folder / "config.toml"]),
            (second, ["status", "test"]),
            (second, ["stage", "register", "--run", "test", "--force"]),
            (second, ["run", folder / "config.toml", "--set", "train.max_steps=3"]),
            (first, ["stage", "train", "--run", "test", "--force"]),
            (first, ["run", folder / "config.toml", "--set", "train.max_steps=3"]),
            (second, ["promote", "test", "--version", "1", "--force"]),
            (first, ["promote", "test", "--version", "2", "--force"]),
            (second, ["rollback", "test"]),
        ]:
            done = run_as(user, "002", *command, GRPO_STORAGE=str(storage))
            assert done.returncode == 0, done.stdout + done.stderr
            assert not [path for path in storage.rglob("*") if not _is_shared(path, storage.stat().st_gid)]
        receipt = json.loads((storage / "runs" / "test" / "training" / "result.json").read_text())
        assert receipt["counted"]["updates"] == 3


def _group(user: str) -> str:
    """The group of the team, whose name ends as the user's."""
    return "team-" + user.rpartition("-")[2]


def _is_shared(path: Path, group: int) -> bool:
    status = path.lstat()
    weights = path.name.endswith(".safetensors")  # one file under two names: read-only
    asked = stat.S_IRGRP if weights or stat.S_ISLNK(status.st_mode) else stat.S_IRGRP | stat.S_IWGRP
    return status.st_gid == group and status.st_mode & asked == asked
