"""A machine of a job follows its stage through files alone, and ends when that falls silent."""

from __future__ import annotations

import json
import signal
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from benchmarks.command import python_path
from tasks.processes import follow, scheduled
from tasks.processes.launchers import batch
from tasks.processes.run import LOST
from tests.processes import wait_for
from tests.tasks.processes.test_batch import _start_follow, _start_member


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTHONPATH", python_path(Path(batch.__file__).parents[3]))
    return tmp_path


@pytest.mark.slow
def test_a_machine_whose_stage_falls_silent_kills_everything(shared: Path) -> None:
    following = _start_follow(shared, "wait")
    member = _start_member(shared, 0)
    assert following.stdout is not None
    stub = int(following.stdout.readline().split()[-1])
    following.kill()  # without a word, as when its machine dies
    following.wait()
    assert member.wait(60) == 137
    assert not psutil.pid_exists(stub)
    assert json.loads((shared / "0.machine").read_text())["status"] == 137
    assert "no sign of life from the machine that started this" in (shared / "0.output").read_text()


@pytest.mark.slow
def test_a_machine_that_starts_when_its_stage_is_gone_ends(shared: Path) -> None:
    (shared / "stage").write_text('{"beats": 7}')
    member = _start_member(shared, 0, "scheduled.SILENCE_SECONDS = 0.3")
    assert b"no sign of life from the stage" in member.communicate(timeout=60)[1]
    assert member.returncode == 1
    member = _start_member(shared / "gone", 0)
    assert b"machine 0 does not see" in member.communicate(timeout=60)[1]


@pytest.mark.slow
def test_a_machine_that_is_told_to_stop_before_its_request_ends_as_told(shared: Path) -> None:
    member = _start_member(shared, 0)
    wait_for((shared / "0.answer").exists)
    member.terminate()
    assert member.wait(60) == 143
    following = _start_follow(shared, "wait")
    assert following.wait(60) == 143


@pytest.mark.slow
def test_a_machine_that_falls_silent_is_lost_once_nothing_can_be_left_there(shared: Path) -> None:
    member = _start_member(shared, 0)
    wait_for((shared / "0.answer").exists)
    patch = "follow.SILENCE_SECONDS = 5.0; follow.ENDING_SECONDS = 0.1"
    following = _start_follow(shared, "wait", patch=patch)
    assert following.stdout is not None
    following.stdout.readline()
    member.send_signal(signal.SIGSTOP)
    try:
        assert "no sign of life for 5 s; waiting 0.1 s" in following.communicate(timeout=60)[0]
        assert following.returncode == LOST
        beats = (shared / "0.stage").read_bytes()
    finally:
        member.send_signal(signal.SIGCONT)
        member.terminate()
        member.wait(60)
    assert (shared / "0.stage").read_bytes() == beats


def test_output_is_read_from_where_reading_stopped(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "0.output"
    assert follow.print_from(file, 0) == 0
    file.write_text("one\ntw")
    shown = follow.print_from(file, 0)
    with file.open("a") as more:
        more.write("o\n")
    assert follow.print_from(file, shown) == 8
    assert capfd.readouterr().out == "one\ntwo\n"


def test_a_machine_knows_its_number_by_its_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in scheduled.NUMBERS:
        with monkeypatch.context() as patch, suppress(KeyError):
            patch.setenv(name, "3")
            assert scheduled.own_number() == 3
    with pytest.raises(SystemExit, match="SLURM_NODEID, JOB_COMPLETION_INDEX is set"):
        scheduled.own_number()
