"""A machine of a job follows its stage through files alone, and ends when that falls silent; and what Slurm's commands
are given, and how their answers are read."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from benchmarks.command import python_path
from grpo_core.config.files import parse_config
from grpo_core.config.run import RunConfig
from grpo_core.errors import ConfigError
from tasks.processes import follow, scheduled
from tasks.processes.launchers import batch, slurm
from tasks.processes.launchers.batch import Job, SchedulerError
from tasks.processes.run import LOST
from tests.conftest import config_values
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


# As Slurm 22.05 prints it, shortened.
SHOWN = (
    "JobId=7 JobName=grpo-x UserId=root(0) MCS_label=N/A Priority=4294901758 JobState={state} Reason={reason} "
    "Dependency=(null) Requeue=0 ExitCode=0:0 ReqNodeList=(null) ExcNodeList=(null) NodeList=alpha,beta BatchHost=alpha"
)
# In place of each of Slurm's commands: writes down what it is given, and answers from files.
STUB = """#!/bin/sh
here=$(dirname "$0")
printf '%s\\n' "$@" > "$here/$(basename "$0").arguments"
cat > "$here/$(basename "$0").input"
cat "$here/answer"
cat "$here/complaint" >&2
exit $(cat "$here/status")
"""


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with stubs of the commands, and what they answer."""
    for name in ("sbatch", "scontrol", "scancel", "srun"):
        (tmp_path / name).write_text(STUB)
        (tmp_path / name).chmod(0o755)
    for name, text in (("answer", "7\n"), ("complaint", ""), ("status", "0")):
        (tmp_path / name).write_text(text)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


def _config(*options: str) -> RunConfig:
    launch = {"launcher": "slurm", "slurm": list(options)}
    return parse_config(config_values(Path("m"), Path("d"), num_processes=6, num_machines=3) | {"launch": launch})


def test_a_job_has_one_task_per_node_and_passes_the_command_on_unchanged(
    commands: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "s3cr3t")
    command = ["env", "PYTHONPATH=it's $HOME; `a` {place}", "python", "-m", "x", "/a folder/50%"]
    options = ("--partition=gpu", "--comment=$(touch x); it's 'quoted'")
    assert slurm.submit(_config(*options), command, Path("/runs/50% of it")) == "7"
    arguments = (commands / "sbatch.arguments").read_text().splitlines()
    for expected in ("--nodes=3", "--ntasks-per-node=1", "--no-requeue", "--output=/runs/50%% of it/job.log", *options):
        assert expected in arguments
    [exported] = [word for word in arguments if word.startswith("--export=")]
    assert "SECRET" not in exported and "ALL" not in exported
    script = (commands / "sbatch.input").read_text()
    assert "s3cr3t" not in script
    subprocess.run(["sh", "-c", script], check=True)
    given = (commands / "srun.arguments").read_text().splitlines()
    assert given[-len(command) :] == command
    assert {"--kill-on-bad-exit=0", "--wait=0"} <= set(given)
    assert shlex.split(script.splitlines()[-1]) == command


@pytest.mark.slow
@pytest.mark.parametrize(
    ("state", "reason", "job"),
    [
        ("PENDING", "Resources", Job("waiting", "PENDING, Resources")),
        ("CONFIGURING", "None", Job("waiting", "CONFIGURING")),
        ("RUNNING", "None", Job("running", "RUNNING on alpha,beta")),
        ("COMPLETING", "None", Job("running", "COMPLETING on alpha,beta")),  # its processes may still end
        ("COMPLETED", "None", Job("ended", "COMPLETED")),
        ("FAILED", "NonZeroExitCode", Job("ended", "FAILED, NonZeroExitCode")),
        ("CANCELLED", "None", Job("ended", "CANCELLED", "person")),
        ("PREEMPTED", "None PreemptTime=None", Job("ended", "PREEMPTED", "scheduler")),
        (
            "FAILED",
            "NonZeroExitCode PreemptTime=2026-11-23T09:09:56",
            Job("ended", "FAILED, NonZeroExitCode, pre-empted", "scheduler"),
        ),
        ("NODE_FAIL", "None", Job("ended", "NODE_FAIL", "scheduler")),
        ("TIMEOUT", "TimeLimit", Job("ended", "TIMEOUT, TimeLimit", "scheduler")),
    ],
)
def test_a_job_s_state_is_read_with_its_reason(commands: Path, state: str, reason: str, job: Job) -> None:
    (commands / "answer").write_text(SHOWN.format(state=state, reason=reason))
    assert slurm.look("7") == job


def test_a_job_that_slurm_has_forgotten_has_ended_and_other_complaints_are_passed_on(commands: Path) -> None:
    (commands / "status").write_text("1")
    (commands / "complaint").write_text("slurm_load_jobs error: Invalid job id specified\n")
    assert slurm.look("7").state == "ended"
    (commands / "complaint").write_text("Unable to contact slurm controller\n")
    for ask in (slurm.look, slurm.cancel):
        with pytest.raises(SchedulerError, match="Slurm: Unable to contact slurm controller"):
            ask("7")


def test_a_machine_without_slurm_is_told_which_command_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SchedulerError, match=r"the command sbatch is missing: .* login node"):
        slurm.submit(_config(), ["true"], tmp_path)


@pytest.mark.parametrize("option", ["--partition=gpu", "--exclusive", "--nodelist=a,b", "--signal=TERM@120", "--hold"])
def test_options_of_the_user_s_are_taken(option: str) -> None:
    assert _config(option).launch.slurm == [option]


@pytest.mark.parametrize(
    "option", ["--nodes=2", "--nod=2", "--ntasks=4", "--output=x", "--out", "--requeue", "--wrap=true", "--array=1-3"]
)
def test_options_that_the_launcher_sets_are_refused_by_name(option: str) -> None:
    with pytest.raises(ConfigError, match=f"launch.slurm.*'{option}' is set by the launcher"):
        _config(option)


@pytest.mark.parametrize("option", ["-p", "gpu", "--partition gpu", "--comment=a\nb", "--", "script.sh", "--=x"])
def test_what_is_no_option_with_its_value_is_refused(option: str) -> None:
    with pytest.raises(ConfigError, match="is not an option of sbatch as --NAME or --NAME=VALUE"):
        _config(option)
