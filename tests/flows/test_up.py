"""Two storages and strangers on one machine: grpo up and the commands beside it use their own servers alone; and one
storage for the members of a group, who are users of this system."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TextIO

import httpx2
import psutil
import pytest

from benchmarks.command import python_path
from flows.cli.terminal import Refusal
from flows.cli.up import _wait_for_end
from flows.serving.children import Child
from flows.serving.find_server import Answer, ask, find_api_to_serve, wait_until_healthy
from flows.serving.up_file import ServerError, announced, find_up, new_up
from tests.command_line import run_here
from tests.conftest import config_values, make_model, make_run, write_config, write_data
from tests.processes import words
from tests.serving import STOP_SECONDS, Served, free_ports, run_grpo, run_up, serving
from tests.users import GRPO, python_as, run_as, seen, users
from tests.web import Quiet, answering

pytestmark = pytest.mark.served

VERSIONS = """
from tests.evaluations import fixed_samples, register_version
for right in (40, 45):
    register_version("sums", fixed_samples({"base": [0] * 50, "trained": [1] * right + [0] * (50 - right)}))
"""
PROJECT = Path(__file__).parents[2]


class Stranger(Quiet):
    """Of a web server of this machine that has nothing to do with Prefect, and answers every request."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A storage with two versions of the model "sums": the first right on 80 % of the prompts, the second on 90 %."""
    storage = tmp_path_factory.mktemp("ours")
    environment = {**os.environ, "GRPO_STORAGE": str(storage), "PYTHONPATH": python_path(PROJECT)}
    subprocess.run([sys.executable, "-c", VERSIONS], cwd=storage, env=environment, check=True, capture_output=True)
    return storage


@pytest.fixture(scope="module")
def served(storage: Path) -> Iterator[Served]:
    with serving(storage) as served:
        yield served


@pytest.mark.e2e
def test_promoting_and_rolling_back_need_no_server_and_say_one_sentence(storage: Path) -> None:
    for arguments, status, said in [
        (("promote", "sums", "--version", "1"), 0, "sums version 1: promoted: accuracy on held-out 80.0% against 0.0%"),
        (("rollback", "sums"), 2, "sums has no champion before version 1"),
    ]:
        done = run_grpo(storage, *arguments)
        assert (done.returncode, (done.stdout + done.stderr).startswith(said)) == (status, True), done
        assert len((done.stdout + done.stderr).splitlines()) == 1
    assert not list((storage / "prefect").iterdir()), "no server was started"


@pytest.mark.e2e
def test_when_a_server_ends_everything_does_and_it_says_which(served: Served) -> None:
    up = psutil.Process(served.process.pid)
    started = up.children(recursive=True)
    [mlflow] = [it for it in started if "mlflow.server.fastapi_app:app" in words(it)]
    mlflow.send_signal(signal.SIGKILL)
    assert served.process.wait(STOP_SECONDS) == 1
    assert not psutil.wait_procs(started, STOP_SECONDS)[1]
    said = served.log.read_text()
    assert "MLflow's server has ended, with status " in said
    assert f"everything else is ended too. It wrote to {served.storage / 'mlflow' / 'server.log'}:" in said
    assert (served.storage / "up.json").read_text() == ""


def test_the_first_server_to_end_is_named_with_the_last_lines_of_its_log(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text("".join(f"line {n}\n" for n in range(40)))
    stays, ends = (subprocess.Popen(["sh", "-c", command]) for command in ("exec sleep 600", "exit 3"))
    try:
        with pytest.raises(Refusal) as refused:
            _wait_for_end([Child("Prefect's server", stays), Child("MLflow's server", ends, log)])
    finally:
        stays.kill()
        stays.wait()
    assert refused.value.exit_status == 1
    said = str(refused.value)
    assert "MLflow's server has ended, with status 3; everything else is ended too" in said
    assert "line 39" in said and "line 29" not in said


def test_a_stranger_on_the_port_is_named_and_nothing_starts(tmp_path: Path) -> None:
    with answering(Stranger) as url:
        port = url.rpartition(":")[2]
        refused = run_up(tmp_path, port, free_ports(1)[0])
    assert (refused.returncode, refused.stdout) == (2, "")
    assert f"--prefect-port {port}: the port is taken by process {os.getpid()} of " in refused.stderr
    assert not (tmp_path / "mlflow").exists()


def test_a_stranger_that_answers_is_not_taken_for_the_server_that_was_started() -> None:
    asked = iter([True, True, False])  # the own server ends, since the port is taken
    with answering(Stranger) as stranger:
        assert not wait_until_healthy(f"{stranger}/api", "own", lambda: next(asked))
    assert next(asked, None) is None


def test_an_up_that_has_ended_is_not_found_whatever_its_file_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRPO_STORAGE", str(tmp_path))
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    up = new_up("http://127.0.0.1:1", "http://127.0.0.1:2")
    with announced(up):
        assert find_up() == up
        left = (tmp_path / "up.json").read_text()
    (tmp_path / "up.json").write_text(left)  # as after SIGKILL
    assert find_up() is None
    with pytest.raises(ServerError, match=r"no server is running for .*set PREFECT_API_URL"):
        find_api_to_serve()


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("http://127.0.0.1:1/api", "no Prefect server answers there ([Errno 111] Connection refused)"),
        ("127.0.0.1:4200/api", "no Prefect server answers there (Request URL is missing an 'http://'"),
        ("https://prefect.invalid/api/accounts/a/workspaces/b", "no Prefect server answers there ("),
        ("{stranger}", "what answers there is not Prefect's API"),
    ],
)
def test_an_address_of_prefect_that_is_none_is_refused_in_one_sentence_before_anything_starts(
    url: str, problem: str, tmp_path: Path, model_folder: Path
) -> None:
    make_run(tmp_path / "runs" / "test", config_values(model_folder, tmp_path))
    write_data(tmp_path)
    config = str(tmp_path / "runs" / "test" / "config.toml")
    commands = [["stage", "validate", "--run", "test"], ["serve"], ["worker", "cpu"]]
    commands += [["sweep", config, "--seeds", "2"], ["run", config]]
    with answering(Stranger) as stranger:
        address = url.format(stranger=stranger)
        for command in commands:
            refused = run_here(*command, GRPO_STORAGE=str(tmp_path), PREFECT_API_URL=address)
            assert refused.returncode == 2 and "starts" not in refused.stdout, (command, refused)
            assert f"PREFECT_API_URL={address}: {problem}" in refused.stderr
            assert refused.stderr.endswith("or unset the variable: without it, the `grpo up` of this storage is used\n")
            assert len(refused.stderr.splitlines()) == 1


def test_an_up_starts_while_another_command_looks_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRPO_STORAGE", str(tmp_path))
    flock = fcntl.flock
    with (tmp_path / "up.json").open("w") as looking:
        flock(looking, fcntl.LOCK_SH)

        def try_then_stop_looking(file: TextIO, operation: int) -> None:
            try:
                flock(file, operation)
            finally:
                flock(looking, fcntl.LOCK_UN)

        monkeypatch.setattr(fcntl, "flock", try_then_stop_looking)
        up = new_up("http://127.0.0.1:1", "http://127.0.0.1:2")
        with announced(up):
            assert find_up() == up


def test_a_file_of_another_version_or_a_folder_is_no_known_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRPO_STORAGE", str(tmp_path))
    with announced(new_up("http://127.0.0.1:1", "http://127.0.0.1:2")):
        (tmp_path / "up.json").write_text('{"url": "http://127.0.0.1:1"}')
        assert find_up() is None
    (tmp_path / "up.json").unlink()
    (tmp_path / "up.json").mkdir()
    assert find_up() is None
    with (
        pytest.raises(ServerError, match=r"up.json cannot be written .Is a directory.: move it away"),
        announced(new_up("http://127.0.0.1:1", "http://127.0.0.1:2")),
    ):
        pass


@pytest.mark.e2e
def test_a_command_s_own_server_has_the_limit_of_one_training_before_the_first_run(tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "test", config_values(tmp_path / "model", tmp_path))
    refused = run_grpo(tmp_path, "stage", "validate", "--run", "test")
    assert refused.returncode == 1
    with closing(sqlite3.connect(tmp_path / "prefect" / "prefect.db")) as database:
        assert database.execute('select name, "limit" from concurrency_limit_v2').fetchall() == [("grpo-training", 1)]


def test_a_storage_whose_name_is_no_text_is_told_to_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As every name beyond ASCII, with PYTHONUTF8=0 in the locale C."""
    import httpx2

    from flows.serving.prefect_server import Named

    storage = tmp_path / os.fsdecode(b"\xfc")
    monkeypatch.setenv("GRPO_STORAGE", str(storage))
    answer = httpx2.Response(200, headers=Named(None).headers)  # type: ignore[arg-type]
    monkeypatch.setattr(httpx2, "get", lambda *_, **__: answer)
    assert ask("http://127.0.0.1:1/api") == Answer("", str(storage))


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
