"""A training that hangs is noticed and explained; one that is slow, asleep or looked at by a debugger is left alone;
and one that is told to end saves and is heard."""

from __future__ import annotations

import ctypes
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_core.config.files import parse_config
from grpo_core.config.run import TrainConfig
from grpo_core.system.progress import RANKS, Record
from grpo_core.training.interrupt import EXIT_STATUS
from tasks.processes import launch as launching
from tasks.processes.launch import launch, torchrun
from tasks.processes.launchers.machines import Machine
from tasks.processes.machine import free_port
from tasks.processes.stacks import HANG
from tasks.processes.watchdog import CHECK_SECONDS, HangError, watchdog
from tests.conftest import config_values

pytestmark = pytest.mark.served

LIMIT = 30.0


class Simulated:
    """Processes whose records say what the test wants, under a clock that it turns."""

    def __init__(self, folder: Path, ranks: int):
        self.folder, self.now = folder, 0.0
        self.open = ExitStack()
        self.check = self.open.enter_context(watchdog(folder, lambda: self.now))
        self.records = [
            Record(rank, ranks, "ab"[rank % 2], "elsewhere", 1, "update", "", False, 0, 0, 0, LIMIT)
            for rank in range(ranks)
        ]

    def set(self, rank: int, **values: Any) -> None:
        self.records[rank] = Record(**{**vars(self.records[rank]), **values})

    def turn(self, seconds: float, moving: set[int], step: float = CHECK_SECONDS) -> None:
        """Let the time pass, in steps, while some of the processes move."""
        for _ in range(round(seconds / step)):
            self.now += step
            for rank in moving:
                self.set(rank, moves=self.records[rank].moves + 1)
            for record in self.records:
                (self.folder / f"{record.rank}.json").write_text(json.dumps(vars(record)))
            self.check()


@pytest.fixture(autouse=True)
def _no_stacks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated processes write none, so there is no need to wait for them."""
    if "run" not in request.fixturenames:
        monkeypatch.setattr("tasks.processes.watchdog.STACKS_SECONDS", 0)


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_the_process_that_the_others_wait_for_is_named(tmp_path: Path, ranks: int) -> None:
    training = Simulated(tmp_path, ranks)
    training.turn(2 * LIMIT, {*range(ranks)})
    last = ranks - 1
    for rank in range(last):
        training.set(rank, waits=True)
    training.set(last, phase="sampling")
    training.turn(LIMIT, set())
    others = f"; {last} of {ranks} processes wait for it" if last else "."
    said = rf"hang: rank {last} \({'ab'[last % 2]}\) has not moved for 3\d s in sampling{others}"
    with pytest.raises(HangError, match=said) as hang:
        training.turn(3 * CHECK_SECONDS, set())
    assert hang.value.restartable


def test_a_training_that_hangs_is_ended_even_if_the_reason_cannot_be_written(tmp_path: Path) -> None:
    training = Simulated(tmp_path, 1)
    (tmp_path / HANG).unlink()
    (tmp_path / HANG).mkdir()
    with pytest.raises(HangError):
        training.turn(2 * LIMIT, set())


def test_processes_that_all_wait_for_each_other_are_cut_off_from_each_other(tmp_path: Path) -> None:
    training = Simulated(tmp_path, 3)
    for rank in range(3):
        training.set(rank, waits=True)
    training.turn(10 * LIMIT, {2})
    with pytest.raises(HangError, match="all 3 processes wait for each other in update, and none has moved") as hang:
        training.turn(2 * LIMIT, set())
    assert hang.value.restartable


def test_a_process_that_may_wait_for_one_at_work_is_left_alone(tmp_path: Path) -> None:
    """NCCL waits without a word: then two processes seem to work, and one compiles or samples for long."""
    training = Simulated(tmp_path, 3)
    training.set(2, waits=True)
    training.set(1, limit=10 * LIMIT)
    training.turn(9 * LIMIT, set())
    training.set(0, limit=20 * LIMIT)
    training.turn(9 * LIMIT, {0})
    training.set(0, limit=LIMIT)
    said = r"rank 1 \(b\) has not moved .*; nor has rank 0 \(a\), in update; 1 of 3 processes wait"
    with pytest.raises(HangError, match=said):
        training.turn(4 * LIMIT, set())


def test_a_process_that_has_not_begun_is_waited_for(tmp_path: Path) -> None:
    training = Simulated(tmp_path, 3)
    del training.records[2]
    for rank in range(2):
        training.set(rank, waits=True)
    training.turn(20 * LIMIT, set())


def test_a_reward_that_hangs_is_named_and_not_started_again(tmp_path: Path) -> None:
    training = Simulated(tmp_path, 2)
    training.set(0, waits=True)
    training.set(1, phase="rewards", reward="judge")
    with pytest.raises(HangError, match=r"rank 1 \(b\) has not moved for 3\d s in reward 'judge'") as hang:
        training.turn(2 * LIMIT, set())
    assert not hang.value.restartable


@settings(max_examples=20)
@given(st.lists(st.tuples(st.floats(0.1, 0.9), st.floats(0, 1e6)), max_size=3))
def test_time_in_which_the_watcher_was_stopped_too_does_not_count(
    tmp_path_factory: pytest.TempPathFactory, course: list[tuple[float, float]]
) -> None:
    """Stopped by hand, or asleep: whatever the clock then says, no process has been seen to stand still."""
    training = Simulated(tmp_path_factory.mktemp("ranks"), 2)
    for share, asleep in course:
        training.turn(2 * CHECK_SECONDS, {0, 1})
        training.turn(share * LIMIT - 3 * CHECK_SECONDS, set())
        training.now += asleep
        training.turn(CHECK_SECONDS, set())


def test_one_sign_of_life_before_the_limit_is_enough(tmp_path: Path) -> None:
    """A judge that retries for hours, a long evaluation, a machine with too much to do: slow, but moving."""
    training = Simulated(tmp_path, 2)
    training.set(1, waits=True)
    for _ in range(30):
        training.turn(0.9 * LIMIT, set())
        training.turn(CHECK_SECONDS, {0})


def test_a_process_that_a_debugger_has_stopped_is_left_alone(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]) as process:
        try:
            _trace(PTRACE_SEIZE, process.pid)
            _trace(PTRACE_INTERRUPT, process.pid)
            os.waitpid(process.pid, 0)
            training = Simulated(tmp_path, 1)
            training.set(0, host=socket.gethostname(), pid=process.pid)
            training.turn(5 * LIMIT, set())
            _trace(PTRACE_DETACH, process.pid)
            with pytest.raises(HangError):
                training.turn(2 * LIMIT, set())
        finally:
            process.kill()


PTRACE_DETACH, PTRACE_SEIZE, PTRACE_INTERRUPT = 17, 0x4206, 0x4207


def _trace(request: int, pid: int) -> None:
    if ctypes.CDLL(None, use_errno=True).ptrace(request, pid, None, None):
        pytest.skip(f"this machine allows no debugger: {os.strerror(ctypes.get_errno())}")


# Two processes that work for a moment; then the last one does what HOW says, and the other waits for it.
STANDING = """
import ctypes, os, signal, sys, threading, time
from pathlib import Path
from grpo_core.system import progress
progress.start(Path(sys.argv[1]))
progress.expect(1.0, {"rewards": 2.0})
how, last = sys.argv[2], os.environ.get("RANK", "0") == str(int(os.environ.get("WORLD_SIZE", "1")) - 1)
threading.Thread(target=signal.sigwait, args=([signal.SIGUSR1],), name="another", daemon=True).start()
for _ in range(2):
    with progress.phase("sampling"), progress.phase("rewards", "strict"):
        pass
def stand_still():
    if how == "wait":
        threading.Event().wait()
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
        signal.pause()
    if how == "hold":
        lock = ctypes.create_string_buffer(64)
        for _ in range(2):  # locked twice, it waits for itself
            ctypes.PyDLL(None).pthread_mutex_lock(lock)
if not last:
    with progress.waiting():
        signal.pause()
with progress.phase("sampling"):
    if how == "hold":
        with progress.phase("rewards", "strict"):
            stand_still()
    stand_still()
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int, str], str]:
    """Starts processes that stand still, and gives the reason for which they are ended."""
    (tmp_path / "standing.py").write_text(STANDING)
    machines = [Machine("", [], "127.0.0.1", free_port(), grace=1.0)]
    monkeypatch.setitem(launching.LAUNCHERS, "local", lambda *_: _given(machines))
    monkeypatch.setattr("tasks.processes.run.GRACE_SECONDS", 1.0)

    def started(ranks: int, how: str) -> str:
        command = [str(tmp_path / "standing.py"), str(tmp_path / RANKS), how]
        config = parse_config(config_values(tmp_path, tmp_path, num_processes=ranks))
        with pytest.raises(HangError) as hang:
            launch(config, command, print, tmp_path)
        return str(hang.value)

    return started


@contextmanager
def _given(machines: list[Machine]) -> Iterator[list[Machine]]:
    yield machines


@pytest.mark.parametrize(
    ("ranks", "how", "said"),
    [
        pytest.param(ranks, how, said, id=f"{how}-{ranks}", marks=[pytest.mark.e2e] * (ranks != tried))
        for how, said, tried in [
            ("wait", "in sampling at PLACE", 1),
            ("stop", r"in sampling at PLACE, and is stopped \(SIGSTOP\)", 2),
            ("hold", "in reward 'strict' at PLACE", None),
        ]
        for ranks in (1, 2)
    ],
)
def test_what_stands_still_is_named_and_every_process_writes_its_stacks(
    tmp_path: Path, run: Callable[[int, str], str], ranks: int, how: str, said: str
) -> None:
    said = said.replace("PLACE", rf"{re.escape(str(tmp_path))}/standing.py:\d+ \(stand_still\)")
    others = "; 1 of 2 processes wait for it" if ranks == 2 else ""
    reason = run(ranks, how)
    assert re.match(rf"hang: rank {ranks - 1} has not moved for \d+ s {said}{others}\. The Python stacks", reason), (
        reason
    )
    for rank in range(ranks):
        stacks = (tmp_path / RANKS / f"{rank}.stacks").read_text()
        assert re.match(rf"[-\d]+ [:\d]+ rank {rank}, process \d+, in s", stacks)
        assert "standing.py" in stacks and stacks.count("hread 0x") == 2
    assert not [*(tmp_path / RANKS).glob("*.json")]
    assert (tmp_path / RANKS / HANG).read_text() == reason.removeprefix("hang: ")


# On its first SIGTERM it saves for a second, and says each line that the end of a training says.
SAVING = """
import signal, sys, time
told = []
signal.signal(signal.SIGTERM, lambda *_: told.append(1))
print("up", flush=True)
while not told:
    time.sleep(0.01)
print("told", flush=True)
end = time.monotonic() + 1
while time.monotonic() < end:
    time.sleep(0.05)
    print("saving", flush=True)
print("saved", flush=True)
sys.exit(143)
"""


def test_processes_save_and_are_heard_however_often_their_launcher_is_told_to_end(tmp_path: Path) -> None:
    (tmp_path / "saving.py").write_text(SAVING)
    words = torchrun(TrainConfig(), "127.0.0.1", free_port())
    process = subprocess.Popen(
        [sys.executable, "-m", "tasks.processes.ranks", *words, tmp_path / "saving.py"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    lines = iter(process.stdout.readline, "")
    assert "up\n" in lines
    process.terminate()
    assert "told\n" in lines
    for _ in range(5):  # as Slurm, its srun and the supervisor do, within milliseconds
        process.terminate()
        time.sleep(0.05)
    assert "saved\n" in lines
    assert process.wait(timeout=60) == EXIT_STATUS
