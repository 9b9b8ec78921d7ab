"""The interpreter that lives on in the sandbox: it is a notebook, and it holds what the sandbox holds."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from dataclasses import replace

import psutil
import pytest

from grpo_core.system.sandbox.bubblewrap import SCRATCH_FILES
from grpo_core.system.sandbox.seccomp import REFUSED
from grpo_core.system.sandbox.session import Session, SessionLimits
from tests.grpo_core.system.attacks import ATTACKS
from tests.grpo_core.system.test_sandbox import answer, marker, named

__all__ = ["marker"]  # a fixture
pytestmark = [
    pytest.mark.slow,
    pytest.mark.needs("bwrap"),
]
LIMITS = SessionLimits(cpu_seconds=1, wall_seconds=300.0)  # the machine may be busy


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    session = Session(LIMITS)
    assert session.run(ATTACKS) == ""
    yield session
    session.close()


def test_variables_and_definitions_are_kept_and_the_last_value_is_shown(session: Session) -> None:
    assert session.run("x = 20\ndef twice(n):\n    return 2 * n\nprint('set')") == "set\n"
    assert session.run("print('first')\ntwice(x) + 2") == "first\n42\n"
    assert session.run("_ + 1") == "43\n"
    assert session.run("x = 'é'; x") == "'é'\n"
    assert session.run("None") == "" and session.run("") == "" and session.run("# nothing") == ""
    assert session.run("import os; os.write(1, b'below Python\\n'); None") == "below Python\n"
    assert session.run("import sys\nsys.stdout = None") is not None and session.run("x") == "'é'\n"
    assert session.run("\ud800\0") is not None and session.run("x") == "'é'\n"


def test_an_error_is_a_short_traceback_and_keeps_the_variables(session: Session) -> None:
    session.run("kept = 1\ndef deep(n):\n    return deep(n + 1)\ndef divide(n):\n    return n / 0")
    shown = session.run("print('before')\ndivide(kept)") or ""
    lines = re.sub(r"<call \d+>", "<call>", shown).splitlines()
    assert "           ~~^~~" in lines
    assert [line for line in lines if line.strip("~^ ")] == [  # Python 3.13 has more lines of marks
        "before",
        "Traceback (most recent call last):",
        '  File "<call>", line 2, in <module>',
        "    divide(kept)",
        '  File "<call>", line 5, in divide',
        "    return n / 0",
        "ZeroDivisionError: division by zero",
    ]
    assert "SyntaxError: '(' was never closed" in (session.run("f(") or "")
    assert len((session.run("deep(0)") or "").splitlines()) < 16
    assert (session.run("import sys\nsys.exit(3)") or "").endswith("SystemExit: 3\n")
    shown = session.run("while True: pass") or ""
    assert shown.endswith("TimeoutError: the 1 seconds of processor time that a call has are up\n")
    assert "<string>" not in shown
    assert "MemoryError" in (session.run("x = bytearray(1 << 30)") or "")
    assert session.run("kept") == "1\n"


def test_long_output_is_cut_in_the_middle_and_says_so(session: Session) -> None:
    text = session.run("print('a' * 10_000 + 'ü' * 10_000)") or ""
    head, said, tail = text.split("\n", 2)
    assert head == "a" * 4000 and tail == "ü" * 3999 + "\n"
    assert said == "[… 12,001 characters of output are left out here …]"
    text = session.run("print(*range(10**6), sep='\\n')") or ""
    assert text.startswith("0\n1\n") and "999999\n" in text and "bytes of output are left out" in text
    assert len(text) < 8200
    assert "File too large" in (session.run("while True: print('x' * 10**6)") or "")
    assert session.run("1") == "1\n"


HELD = [
    *(f"read({path!r})" for path in ("/etc/passwd", "/root/.bashrc", "/proc/1/environ", "/dev/mem", __file__)),
    *(f"write({path!r})" for path in ("/x", "/usr/lib/x", "/dev/shm/x", "/tmp/left")),
    "connect(2, ('127.0.0.1', 80))",
    "connect(1, '\\0x')",
    "tried(lambda: os.setuid(1))",
    "tried(lambda: os.chroot('/tmp'))",
    "tried(lambda: os.nice(-5))",
    "tried(lambda: os.execv('/bin/sh', ['sh']))",
    "tried(lambda: os.memfd_create('x'))",
    "[os.getuid(), os.geteuid(), os.getgid(), *os.getgroups()]",
    "fill('/dev/shm')",
    "sorted(set(os.environ) - {'LC_CTYPE', 'PWD'})",
    *(f"call({REFUSED[name][0]}, 0, 0, 0, 0, 0)" for name in ("ptrace", "bpf", "unshare", "io_uring_setup")),
]


@pytest.mark.parametrize("attack", HELD)
def test_an_attack_gets_what_it_gets_in_the_sandbox_of_a_program(session: Session, attack: str) -> None:
    if attack.startswith("call") and os.uname().machine != "x86_64":
        pytest.skip("the numbers are those of x86-64")
    assert ast.literal_eval((session.run(attack) or "").strip()) == answer(attack)


def test_processes_are_few_and_end_with_the_session(marker: str) -> None:
    session = Session(LIMITS)
    session.run(ATTACKS)
    assert session.run(f"daemon({marker!r})") == "'left'\n"
    made, why = ast.literal_eval(session.run(f"forks({marker!r})") or "")
    assert 0 < made <= LIMITS.processes and why == "Resource temporarily unavailable"
    assert named(marker)
    session.close()


def test_code_is_told_that_its_output_is_lost_once_it_has_filled_the_scratch() -> None:
    session = Session(LIMITS)
    session.run(ATTACKS)
    session.run("fill('/tmp')")
    lost = "OSError: [Errno 28] No space left on device: what was printed is lost; remove files from /tmp\n"
    assert session.run("print('x')") == lost
    assert (session.run("print('x')\n1 / 0") or "").endswith(f"ZeroDivisionError: division by zero\n{lost}")
    assert session.run("os.remove('/tmp/0')") == "" and session.run("print('x')") == "x\n"
    session.close()


def test_files_of_all_calls_together_are_few() -> None:
    session = Session(LIMITS)
    assert session.run(ATTACKS) == ""
    made = session.run("files('/tmp')")
    if os.geteuid() == 0:
        assert made and ast.literal_eval(made.strip())[0] < SCRATCH_FILES
        assert session.run("tried(lambda: os.mknod('/tmp/one'))") == "'No space left on device'\n"
    else:
        assert made is None
    session.close()


@pytest.mark.parametrize(
    "code",
    [
        "os._exit(0)",
        "os.kill(1, 9); os.kill(-1, 9)",
        "os.closerange(0, 64)",
        "[os.write(file, b'\\xff' * 64) for file in range(3, 9)]",
        "[os.write(file, b'\\0\\0\\0\\x02hi' * 9) for file in range(3, 9)]",
        "os.kill(os.getpid(), 19)",
        "import ctypes; ctypes.string_at(0)",
        "import time; time.sleep(1000)",
        pytest.param("10 ** 10 ** 9", marks=pytest.mark.e2e),
        "exec('[' * 10 ** 6)",
    ],
)
def test_code_that_breaks_its_interpreter_breaks_that_alone(code: str) -> None:
    session = Session(replace(LIMITS, wall_seconds=3.0))
    session.run("import os")
    if session.run(f"try:\n    {code}\nexcept OSError: pass") is not None:
        session.run("1")
    process = session.process
    session.close()
    assert not psutil.pid_exists(process.pid)
