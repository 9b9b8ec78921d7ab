"""A run directory has one writer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from grpo_core.config.files import load_config, parse_config
from tasks.registry.champion import model_lock
from tasks.stages import locks
from tasks.stages.locks import RunInUseError, locked
from tasks.stages.run_directory import open_run
from tests.processes import runs
from tests.tasks.stages.small_stages import Values

HOLD = """
import sys
from pathlib import Path
from tasks.stages.locks import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""

# Supervises a process that lets SIGTERM pass until it is told through a file that it may end.
HOLD_AND_SUPERVISE = """
import sys
from pathlib import Path
from tasks.processes.run import run_process
from tasks.stages.locks import locked
STUBBORN = '''
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(os.getpid(), flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.05)
'''
with locked(Path(sys.argv[1])):
    run_process(["-c", STUBBORN, sys.argv[2]], lambda line: print(line, flush=True), grace=60)
"""


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start Python code; its first line is read. What is left of it is killed in the end."""
    started: list[subprocess.Popen[str]] = []

    def _start(code: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield _start
    for process in started:
        process.kill()
        process.wait()


def hold(run: Path, start: Any, **environment: str) -> Any:
    holder = start(HOLD, str(run), **environment)
    assert holder.stdout.readline() == "held\n"
    return holder


def test_a_second_process_is_refused_at_once_with_who_holds_the_run(run: Path, start: Any) -> None:
    holder = hold(run, start)
    refusal = rf"run 'test' is in use by process {holder.pid} on .* since 20.*cancel it"
    with pytest.raises(RunInUseError, match=refusal), locked(run, say=pytest.fail):
        raise AssertionError("two writers")
    holder.stdin.close()
    holder.wait(timeout=20)
    with locked(run):
        pass


def test_a_run_that_is_in_use_keeps_its_configuration(run: Path, values: Values, start: Any) -> None:
    hold(run, start)
    with pytest.raises(RunInUseError), open_run(parse_config({**values, "seed": 1})):
        raise AssertionError("two writers")
    assert load_config(run / "config.toml").seed == 0


def test_a_waiting_process_gets_the_run_when_it_is_free_and_is_told_which_one_has_it(
    run: Path, start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "ENDING_SECONDS", 0.0)  # which is for what is about to end
    holder = hold(run, start)
    told: list[str] = []
    with locked(run, say=lambda line: (told.append(line), holder.stdin.close()), wait=True):
        assert holder.wait(timeout=20) == 0
    [line] = told
    assert f"run 'test' is in use by process {holder.pid} on" in line and line.endswith("waiting until it is free")


def test_who_waited_while_the_run_was_removed_waits_for_who_has_made_it_again(run: Path, start: Any) -> None:
    holders = [hold(run, start)]

    def say(line: str) -> None:
        if len(holders) == 1:
            run.rename(run.with_name("removed"))
            run.mkdir()
            holders.append(hold(run, start))
            holders[0].stdin.close()
        else:
            assert f"process {holders[1].pid}" in line
            holders[1].stdin.close()

    with locked(run, say, wait=True):
        assert [holder.wait(timeout=20) for holder in holders] == [0, 0]


def test_a_run_is_free_once_its_holder_was_killed(run: Path, start: Any) -> None:
    holder = hold(run, start)
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with locked(run, say=pytest.fail):
        pass


@pytest.mark.slow
def test_a_run_stays_locked_while_what_a_killed_holder_supervised_is_ending_and_is_waited_for(
    run: Path, start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end = tmp_path / "may-end"
    holder = start(HOLD_AND_SUPERVISE, str(run), str(may_end))
    child = psutil.Process(int(holder.stdout.readline()))
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    monkeypatch.setattr(locks, "ENDING_SECONDS", 0.3)
    with pytest.raises(RunInUseError, match=f"process {holder.pid}"), locked(run):
        raise AssertionError("two writers")
    assert child.is_running()

    monkeypatch.setattr(locks, "ENDING_SECONDS", 60.0)
    told: list[str] = []
    with locked(run, say=lambda line: (told.append(line), may_end.touch())):
        assert not runs(child)
    assert len(told) == 1
    assert "waiting up to 60 s" in told[0]


def test_a_retry_waits_for_the_attempt_before_it_and_another_flow_run_does_not(
    run: Path, start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = hold(run, start, PREFECT__FLOW_RUN_ID="one")
    monkeypatch.setenv("PREFECT__FLOW_RUN_ID", "two")
    with pytest.raises(RunInUseError), locked(run, say=pytest.fail):
        raise AssertionError("two writers")
    monkeypatch.setenv("PREFECT__FLOW_RUN_ID", "one")
    with locked(run, say=lambda line: attempt.stdin.close()):
        assert attempt.wait(timeout=20) == 0


def test_every_model_has_its_own_lock_however_long_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRPO_STORAGE", str(tmp_path))
    longest = "模" * 256  # characters of MLflow's column; 768 bytes, a file's name has 255 at most
    for name in (longest, longest[:-1] + "型", "m", "m"):
        with model_lock(name):
            pass
    assert len(list((tmp_path / "models").iterdir())) == 3
