"""Machines of a scheduler's job need only a shared folder; they end when it falls silent, and leave nothing."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.command import python_path
from grpo_core.config.files import parse_config
from grpo_core.config.run import RunConfig
from tasks.processes.launchers import batch
from tasks.processes.launchers.batch import PREFIX, Job, Scheduler, SchedulerError
from tasks.processes.machine import code_version
from tasks.processes.run import ProcessError, TakenError, run_together
from tasks.stages.errors import StageError
from tests.conftest import config_values

pytestmark = pytest.mark.served

# A machine whose `ranks` is a stub: it says what it has got, and waits until it is told to stop if asked to.
MEMBER = """
import sys
from tasks.processes import scheduled
scheduled.POLL_SECONDS = 0.02
scheduled.BEAT_SECONDS = 0.1
{patch}
STUB = '''
import os, signal, sys, time
def stop(*_):
    if meet := os.environ.get("MEET"):  # as in a collective, each waits for the other
        open(os.path.join(meet, str(os.getpid())), "w").close()
        while len(os.listdir(meet)) < 2:
            time.sleep(0.02)
    print("saved", flush=True)
    sys.exit(143)
signal.signal(signal.SIGTERM, stop)
print(sys.argv[1:], os.environ.get("SECRET"), os.getpid(), flush=True)
end = sys.argv[-1]
time.sleep(600 if end == "wait" else 0)
sys.exit(int(end))
'''
def supervised(request, silence):
    silence = min(silence, 5.0)
    supervise = ["-m", "tasks.processes.supervise", "--silence", str(silence), "5"]
    return [sys.executable, *supervise, sys.executable, "-c", STUB, *request["arguments"]]
scheduled.supervised = supervised
scheduled.main()
"""
FOLLOW = """
from tasks.processes import follow
follow.POLL_SECONDS = 0.02
follow.BEAT_SECONDS = 0.1
{patch}
follow.main()
"""


def _start_member(shared: Path, number: int, patch: str = "") -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", MEMBER.format(patch=patch), shared],
        env={**os.environ, "SLURM_NODEID": str(number), "SLURMD_NODENAME": "ab"[number]},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )


def _start_follow(shared: Path, *words: str, patch: str = "", number: int = 0) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", FOLLOW.format(patch=patch), shared, str(number), *words],
        env={**os.environ, "SECRET": "it's $HOME"},
        stdout=subprocess.PIPE,
        text=True,
    )


class Here:
    """A scheduler whose jobs are processes of this machine; a job waits for as many looks as it is told."""

    def __init__(self) -> None:
        self.jobs: dict[str, list[subprocess.Popen[bytes]]] = {}
        self.looks_to_wait, self.refusals, self.lost_answers = 0, 0, 0
        self.ended_by: Any = "itself"
        self.start: Callable[[Path, int], subprocess.Popen[bytes]] = _start_member

    def submit(self, config: RunConfig, command: list[str], shared: Path) -> str:
        assert command[-3:] == ["-m", "tasks.processes.scheduled", str(shared)]
        if self.refusals:
            self.refusals -= 1
            raise SchedulerError("the controller is away")
        job = f"job-{len(self.jobs)}"
        self.jobs[job] = [] if self.looks_to_wait else self._run(config, shared)
        self.pending = (config, shared)
        if self.lost_answers:
            self.lost_answers -= 1
            raise SchedulerError("the controller has taken the job and does not say so")
        return job

    def _run(self, config: RunConfig, shared: Path) -> list[subprocess.Popen[bytes]]:
        return [self.start(shared, number) for number in range(config.num_machines)]

    def look(self, job: str) -> Job:
        if not self.jobs[job]:
            self.looks_to_wait -= 1
            if self.looks_to_wait:
                return Job("waiting", "Resources")
            self.jobs[job] = self._run(*self.pending)
        if any(process.poll() is None for process in self.jobs[job]):
            return Job("running")
        return Job("ended", "the reason", self.ended_by)

    def cancel(self, job: str) -> None:
        for process in self.jobs[job]:
            process.terminate()

    def scheduler(self) -> Scheduler:
        return Scheduler("Here", self.submit, self.look, self.cancel)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[Here]:
    monkeypatch.setenv("PYTHONPATH", python_path(Path(batch.__file__).parents[3]))
    monkeypatch.setattr(batch, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(batch, "POLL_SECONDS", 0.02)
    here = Here()
    yield here
    for process in (process for job in here.jobs.values() for process in job):
        process.kill()
        process.wait()


def _config() -> RunConfig:
    ssh = {"launcher": "ssh", "hosts": ["a", "b"]}
    return parse_config(config_values(Path("m"), Path("d"), num_processes=2, num_machines=2) | {"launch": ssh})


def _run(
    here: Here, folder: Path, *words: str, patience: float = 0.0, disturb: Callable[[str], None] = lambda line: None
) -> list[str]:
    """Run the stub on two machines to its end, and give the lines in the stage's log."""
    lines: list[str] = []

    def on_line(name: str, line: str) -> None:
        lines.append(f"{name}: {line}")
        disturb(line)

    with batch.batch(here.scheduler())(_config(), folder, patience, lines.append) as machines:
        [shared] = folder.glob(f"{PREFIX}*")
        assert stat.S_IMODE(shared.stat().st_mode) == 0o700
        commands = {
            it.name: ["-c", FOLLOW.format(patch=""), *it.command[2:], "-m", "work", str(number), *words]
            for number, it in enumerate(machines)
        }
        try:
            run_together(commands, on_line, {name: {"SECRET": "it's $HOME"} for name in commands})
        finally:
            assert not [*shared.glob("*.request")]
            assert b"$HOME" not in b"".join(file.read_bytes() for file in shared.glob("*.[ams]*"))
    return lines


def _once_both_wait(told: list[str], act: Callable[[], None]) -> Callable[[str], None]:
    """Keeps the lines, and acts when both machines have said that they wait."""

    def disturb(line: str) -> None:
        told.append(line)
        if sum("wait" in each for each in told) == 2 and "wait" in line:
            act()

    return disturb


def _answering(*answers: dict[str, str]) -> Callable[[Path, int], subprocess.Popen[bytes]]:
    """Starts machines that answer so, and end."""

    def start(shared: Path, number: int) -> subprocess.Popen[bytes]:
        answer = {"sees_run": True, "version": code_version(), "problem": "", "address": "", "port": 1}
        (shared / f"{number}.answer").write_text(json.dumps(answer | answers[number]))
        return subprocess.Popen([sys.executable, "-c", ""])

    return start


def test_machines_run_what_the_stage_asks_for_and_nothing_is_left(here: Here, tmp_path: Path) -> None:
    here.looks_to_wait = 3
    lines = _run(here, tmp_path, "0")
    assert lines[0] == "Here: job job-0 is waiting (Resources)"
    assert "Here: job job-0 runs on a, b" in lines
    for name, number in (("a", "0"), ("b", "1")):
        assert any(line.startswith(f"{name}: ['-m', 'work', '{number}', '0'] it's $HOME") for line in lines)
    assert [process.returncode for process in here.jobs["job-0"]] == [0, 0]
    assert not [*tmp_path.iterdir()]


def test_a_job_that_was_taken_without_an_answer_does_not_mix_with_the_next(here: Here, tmp_path: Path) -> None:
    folders: list[Path] = []

    def start(shared: Path, number: int) -> subprocess.Popen[bytes]:
        assert not any(folder.exists() for folder in folders if folder != shared)
        folders.append(shared)
        return subprocess.Popen([sys.executable, "-c", ""])

    here.start, here.lost_answers = start, 1
    with pytest.raises(StageError, match="job-1"):
        _run(here, tmp_path, "0", patience=60.0)
    assert folders[0] == folders[1] != folders[2] == folders[3]
    assert not [*tmp_path.iterdir()]


def test_machines_of_the_same_name_are_told_apart(here: Here, tmp_path: Path) -> None:
    here.start = _answering({"name": "node"}, {"name": "node"})
    with batch.batch(here.scheduler())(_config(), tmp_path, 0.0, lambda line: None) as machines:
        assert [machine.name for machine in machines] == ["node-0", "node-1"]


@pytest.mark.parametrize(
    ("ended_by", "error", "said"),
    [
        ("scheduler", TakenError, r"Here ended job job-0 \(the reason\): machine . ended with status 143"),
        pytest.param("itself", TakenError, "machine . ended with status 143", marks=pytest.mark.e2e),
        pytest.param("person", StageError, "somebody cancelled job job-0 in Here", marks=pytest.mark.e2e),
    ],
)
def test_machines_that_are_told_to_stop_save_and_say_who_took_them(
    here: Here, tmp_path: Path, ended_by: str, error: type[StageError], said: str
) -> None:
    here.ended_by, told = ended_by, list[str]()

    with pytest.raises(error, match=said) as failed:
        _run(here, tmp_path, "wait", disturb=_once_both_wait(told, lambda: here.cancel("job-0")))
    assert type(failed.value) is error
    assert told.count("saved") == 2
    assert not [*tmp_path.iterdir()]


def test_all_machines_are_told_to_stop_when_one_is_and_save_together(
    here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, told = tmp_path / "run", list[str]()
    for each in (folder, tmp_path / "meet"):
        each.mkdir()
    monkeypatch.setenv("MEET", str(tmp_path / "meet"))

    with pytest.raises(TakenError):
        _run(here, folder, "wait", disturb=_once_both_wait(told, lambda: here.jobs["job-0"][1].terminate()))
    assert told.count("saved") == 2


def test_a_stage_that_stops_leaves_no_machine_and_a_failure_stays_the_training_s_own(
    here: Here, tmp_path: Path
) -> None:
    def interrupt(line: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _run(here, tmp_path, "wait", disturb=interrupt)
    assert [process.poll() for process in here.jobs["job-0"]] == [143, 143]
    with pytest.raises(ProcessError, match=r"machine . ended with status 3") as failed:
        _run(here, tmp_path, "3")
    assert not failed.value.restartable and not [*tmp_path.iterdir()]


def test_a_job_that_ends_before_its_machines_answer_is_refused_with_what_it_printed(here: Here, tmp_path: Path) -> None:
    def start(shared: Path, number: int) -> subprocess.Popen[bytes]:
        (shared / "job.log").write_text("no such python\n")
        return subprocess.Popen([sys.executable, "-c", ""])

    here.start = start
    for ended_by, error in (("itself", StageError), ("scheduler", TakenError)):
        here.ended_by = ended_by
        with pytest.raises(error, match=r"before all its machines had started: the reason. .*\nno such python"):
            _run(here, tmp_path, "0")
    assert not [*tmp_path.iterdir()]


def test_a_job_that_waits_is_cancelled_with_the_stage_and_a_killed_stage_s_by_the_next(
    here: Here, tmp_path: Path
) -> None:
    here.start = lambda shared, number: subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    says: list[str] = []

    def say(line: str) -> None:
        says.append(line)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), batch.batch(here.scheduler())(_config(), tmp_path, 0.0, say):
        pass
    assert says == ["Here: job job-0 is running"]
    assert [process.poll() for process in here.jobs["job-0"]] == [-15, -15]
    left = tmp_path / f"{PREFIX}left"
    left.mkdir()
    (left / "job").write_text(here.submit(_config(), ["-m", "tasks.processes.scheduled", str(left)], left))
    here.refusals = 2
    with pytest.raises(SchedulerError), batch.batch(here.scheduler())(_config(), tmp_path, 0.0, say):
        pass
    assert [process.poll() for process in here.jobs["job-1"]] == [-15, -15]
    with pytest.raises(KeyboardInterrupt), batch.batch(here.scheduler())(_config(), tmp_path, 5.0, say):
        pass  # submitted in the second try
    assert not [*tmp_path.iterdir()]


def test_a_machine_with_other_code_is_refused_by_name(here: Here, tmp_path: Path) -> None:
    here.start = _answering({"name": "node0"}, {"name": "node1", "version": "code 0"})
    with pytest.raises(StageError, match="node1 has code 0, but this machine code "):
        _run(here, tmp_path, "0")
