"""Nothing that a stage starts outlives it, however it ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from pathlib import Path

import psutil
import pytest

from tasks.processes.run import TimeLimitError, run_process
from tasks.stages.errors import StageError
from tests.processes import existing, wait_for

pytestmark = pytest.mark.served

# Starts a child in a session of its own (as torch's launcher and vLLM do), both deaf to SIGTERM; then says both pids.
TREE = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    "print('up', flush=True); time.sleep(600)"], stdout=subprocess.PIPE, start_new_session=True)
child.stdout.readline()
print(os.getpid(), child.pid, flush=True)
time.sleep(600)
"""

GRACE = "0.3"


def _gone(pids: list[int]) -> bool:
    return not psutil.wait_procs(existing(pids), timeout=15)[1]


def _start_tree(
    patch: str = "",
    stdin: int | socket.socket = subprocess.PIPE,
    options: Sequence[str] = (GRACE,),
    command: str = TREE,
) -> tuple[subprocess.Popen[str], list[int]]:
    """Under `tasks.processes.supervise`, in which `patch` is run first; and the ids of the tree's processes."""
    code = f"from tasks.processes import supervise\n{patch}\nsupervise.main()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, *options, sys.executable, "-c", command],
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return process, [int(pid) for pid in process.stdout.readline().split()]


# Leaves processes whose parents have ended, as each run of the sandbox does; then says their ids.
ORPHANS = """
import os, time
for _ in range(3):
    if middle := os.fork():
        os.waitpid(middle, 0)
        continue
    if orphan := os.fork():
        print(orphan, end=" ", flush=True)
    os._exit(0)
print(flush=True)
time.sleep(600)
"""


def test_orphans_that_have_ended_are_forgotten_while_the_command_runs() -> None:
    process, orphans = _start_tree(command=ORPHANS)
    wait_for(lambda: not any(map(psutil.pid_exists, orphans)), 60)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=20) == 128 + signal.SIGTERM
    assert len(orphans) == 3


def test_sigterm_to_the_supervisor_ends_descendants_that_ignore_it_and_left_the_session() -> None:
    process, pids = _start_tree()
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=20) == 128 + signal.SIGKILL
    assert _gone(pids)


def test_the_death_of_the_asking_process_ends_the_tree() -> None:
    process, pids = _start_tree()
    assert process.stdin is not None
    process.stdin.close()
    process.wait(timeout=20)
    assert _gone(pids)


def test_the_end_of_sshd_s_socket_ends_the_tree() -> None:
    here, there = socket.socketpair()
    process, pids = _start_tree(stdin=there)
    there.close()
    here.close()
    process.wait(timeout=20)
    assert _gone(pids)


def test_silence_kills_the_tree_without_grace() -> None:
    process, pids = _start_tree(options=("--silence", "1", "600"))
    assert process.wait(timeout=20) == 128 + signal.SIGKILL
    assert _gone(pids)


SAYS_THAT_IT_WAITS = """
import asyncio, os
call_later = asyncio.SelectorEventLoop.call_later
def noted(loop, delay, *call):
    if delay == 600:
        os.write(2, b"waits\\n")
    return call_later(loop, delay, *call)
asyncio.SelectorEventLoop.call_later = noted
"""


def test_signs_of_life_keep_the_tree() -> None:
    """Each answered, so that none has to come in time."""
    process, pids = _start_tree(SAYS_THAT_IT_WAITS, options=("--silence", "600", GRACE))
    assert process.stdin is not None and process.stderr is not None
    for _ in range(3):
        assert process.stderr.readline() == "waits\n"
        process.stdin.write("\n")
        process.stdin.flush()
    process.stdin.close()
    process.wait(timeout=20)
    assert _gone(pids)


# The child dies between the look at it and the signal to it, and is reaped: after the signal from Python 3.12 on.
DIES_JUST_THEN = """
import os, signal, sys
import psutil
killpg = os.killpg
def late(pid, number):
    os.kill(pid, signal.SIGKILL)
    while psutil.pid_exists(pid):
        if sys.version_info >= (3, 12) and psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            break
    killpg(pid, number)
os.killpg = late
"""


def test_what_a_child_has_started_ends_too_if_the_child_dies_as_it_is_told_to() -> None:
    process, pids = _start_tree(DIES_JUST_THEN)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=20) == 128 + signal.SIGKILL
    assert _gone(pids)


@pytest.mark.parametrize("killed", ["supervisor", "guard"])
def test_sigkill_of_the_supervisor_or_its_guard_leaves_nothing(killed: str) -> None:
    process, pids = _start_tree()
    supervisor = psutil.Process(pids[0]).ppid()
    assert psutil.Process(supervisor).ppid() == process.pid
    os.kill(supervisor if killed == "supervisor" else process.pid, signal.SIGKILL)
    assert process.wait(timeout=20) == (128 + signal.SIGKILL if killed == "supervisor" else -signal.SIGKILL)
    assert _gone([supervisor, *pids])


def test_processes_that_survive_sigkill_are_named_and_left_behind() -> None:
    """As in uninterruptible sleep, which nothing here can bring about."""
    patch = (
        "import psutil; psutil.Process.kill = lambda self: None; import grpo_core.system.descendants as descendants; "
    )
    process, pids = _start_tree(f"{patch}descendants.KILL_SECONDS = 0.1")
    process.send_signal(signal.SIGTERM)
    try:
        assert process.wait(timeout=20) == 128 + signal.SIGKILL
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):  # asyncio kills the child of a loop that ends, if it sees it in time
                os.kill(pid, signal.SIGKILL)
    assert _gone(pids)
    assert process.stderr is not None
    assert f"SIGKILL does not end them (a driver that hangs?): {pids[0]}, {pids[1]}" in process.stderr.read()


def test_sigkill_of_a_process_inside_run_process_leaves_no_orphan(tmp_path: Path) -> None:
    script = tmp_path / "tree.py"
    script.write_text(TREE)
    asker = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "from tasks.processes.run import run_process;"
            f"run_process([{str(script)!r}], lambda line: print(line, flush=True), grace={GRACE})",
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert asker.stdout is not None
    pids = [int(pid) for pid in asker.stdout.readline().split()]
    supervisor = psutil.Process(pids[0]).ppid()
    os.kill(asker.pid, signal.SIGKILL)
    asker.wait()
    assert _gone([supervisor, *pids])


def _status_when_told_to_end(*words: str) -> int:
    """Of `tasks.processes.supervise` with these words, which is sent SIGTERM once its command says that it is up."""
    command = [sys.executable, "-m", "tasks.processes.supervise", *words]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGTERM)
    return process.wait(timeout=60)


def test_a_graceful_child_gets_to_finish_on_sigterm() -> None:
    code = (
        "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(7)); "
        "print('up', flush=True); signal.pause()"
    )
    assert _status_when_told_to_end("20", sys.executable, "-c", code) == 7


# As Prefect's runner, kills its child when it is told to end; the child takes a moment to save.
RUNNER = """
import signal, subprocess, sys
def end(*_):
    child.kill()
    sys.exit()
signal.signal(signal.SIGTERM, end)
code = "import signal, sys, time; from pathlib import Path; " \\
    "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(1), Path(sys.argv[1]).touch(), sys.exit())); " \\
    "print('up', flush=True); signal.pause()"
child = subprocess.Popen([sys.executable, "-c", code, sys.argv[1]])
child.wait()
signal.pause()
"""


def test_with_children_first_a_runner_is_told_to_end_when_its_children_have_ended(tmp_path: Path) -> None:
    words = ("--children-first", "60", sys.executable, "-c", RUNNER, str(tmp_path / "saved"))
    assert _status_when_told_to_end(*words) == 0
    assert (tmp_path / "saved").exists()


# Dies at once; its child, told at the same time, takes a while to save.
LAUNCHER = """
import subprocess, sys
code = "import signal, sys, time; from pathlib import Path; " \
    "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(3), Path(sys.argv[1]).touch(), sys.exit())); " \
    "print('up', flush=True); signal.pause()"
subprocess.Popen([sys.executable, "-c", code, sys.argv[1]]).wait()
"""


def test_a_child_that_still_saves_is_awaited_when_its_launcher_died_at_once(tmp_path: Path) -> None:
    words = ("60", sys.executable, "-c", LAUNCHER, str(tmp_path / "saved"))
    assert _status_when_told_to_end(*words) == 128 + signal.SIGTERM
    assert (tmp_path / "saved").exists()


def test_what_a_process_says_while_it_ends_is_heard_and_awaited() -> None:
    code = (
        "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: (print('saved'), sys.exit())); "
        "print('up'); signal.pause()"
    )
    lines = []

    def interrupted(line: str) -> None:
        lines.append(line)
        if line == "up":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_process(["-c", code], interrupted)
    assert lines == ["up", "saved"]


@pytest.mark.parametrize(
    ("end", "status"),
    [("raise SystemExit(3)", "status 3"), ("import os; os.kill(os.getpid(), 9)", r"status 137 \(SIGKILL\)")],
)
def test_a_failing_process_is_reported_with_its_status_and_last_lines(end: str, status: str) -> None:
    lines: list[str] = []
    with pytest.raises(StageError, match=rf"{status};(.|\n)*the reason"):
        run_process(["-c", f"print('the reason', flush=True); {end}"], lines.append)
    assert lines == ["the reason"]


def test_a_process_that_does_not_end_in_time_is_killed_and_reported_with_its_last_lines() -> None:
    code = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up'); signal.pause()"
    lines: list[str] = []
    with pytest.raises(TimeLimitError, match=r"had not ended after 3 s; its last lines:\nup"):
        run_process(["-c", code], lines.append, grace=0.1, limit=3.0)
    assert lines == ["up"]


WAITING = """
import os, sys, time
print(os.getpid(), flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
"""


@pytest.mark.parametrize("fails", [False, True])
def test_output_that_stays_open_after_the_end_is_not_waited_for(
    fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it does if SIGKILL does not end a process, because a driver hangs."""
    monkeypatch.setattr("tasks.processes.run.OPEN_SECONDS", 0.1)
    held: list[int] = []

    def hold(line: str) -> None:
        held.append(os.open(f"/proc/{line}/fd/1", os.O_WRONLY))
        (tmp_path / "go").touch()
        if fails:
            raise ValueError

    with pytest.raises(ValueError) if fails else nullcontext():
        run_process(["-c", WAITING, str(tmp_path / "go")], hold, grace=0.1)
    os.close(*held)


def test_a_time_limit_holds_for_output_that_comes_faster_than_it_is_read() -> None:
    code = "import time\nwhile True:\n    print('more', flush=True)\n    time.sleep(0.0002)"

    def slow(line: str) -> None:
        threading.Event().wait(0.002)

    with pytest.raises(TimeLimitError):
        run_process(["-c", code], slow, grace=0.1, limit=1.0)
