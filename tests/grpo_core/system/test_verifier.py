"""A verifier in the sandbox, which evaluates what it is given: attacks by answers, and what becomes of each verdict."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from grpo_core.system.sandbox import verifier as module
from grpo_core.system.sandbox.bubblewrap import SandboxError
from grpo_core.system.sandbox.verifier import NoVerdictError, Verifier
from tests.grpo_core.system.attacks import ATTACKS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.needs("bwrap"),
]
SOURCE = ATTACKS + "import resource\ndef judge(answer, expected=None):\n    found = eval(answer)\n" + (
    "    return found if expected is None else float(found == expected)\n"
)  # fmt: skip
READ_ONLY = "Read-only file system"


@pytest.fixture(scope="module")
def verifier() -> Iterator[Verifier]:
    started = Verifier(SOURCE)
    yield started
    started.process.kill()


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        ("__import__('os').system('id') in (127 << 8, -1)", True),  # no shell, or no process: by the release of glibc
        ("tried(lambda: os.fork())", "Resource temporarily unavailable"),
        ("threads()", 0),
        ("read('/etc/passwd')", "No such file or directory"),
        (f"read({__file__!r})", "No such file or directory"),
        ("write('/tmp/x')", READ_ONLY),
        ("tried(lambda: os.mknod('/tmp/x'))", READ_ONLY),
        (f"write({module.__file__!r})", "No such file or directory"),
        (f"write({pytest.__file__!r})", READ_ONLY),
        ("connect(2, ('127.0.0.1', 80))", "Operation not permitted"),
        ("sorted(set(os.environ) - {'LC_CTYPE', 'PWD'})", sorted(module.THREADS)),
        ("tried(lambda: os.kill(1, 9))", None),
        ("tried(lambda: os.kill(1, 2))", None),
        ("tried(lambda: os.kill(1, 19))", None),
        ("tried(lambda: resource.prlimit(1, resource.RLIMIT_CPU, (0, 0)))", "Operation not permitted"),
        ("tried(lambda: os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0)))", "Operation not permitted"),
        ("tried(lambda: os.setpriority(os.PRIO_PROCESS, 1, 19))", "Operation not permitted"),
        ("tried(lambda: bytearray(1 << 30))", "MemoryError"),
        ("tried(lambda: __import__('mmap').mmap(-1, 600 << 20))", "Cannot allocate memory"),  # shared, by default
        ("tried(lambda: len(bytearray(400 << 20)))", 400 << 20),
    ],
)
def test_an_answer_reaches_nothing_and_the_next_one_is_judged(verifier: Verifier, answer: str, found: Any) -> None:
    judged = f"{answer} or 0" if found is None else answer
    assert verifier.score(answer=judged, expected=found or 0) == 1.0
    assert verifier.score(answer="40 + 2") == 42.0


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("'five'", "ValueError: could not convert string to float"),
        ("float('nan')", "nan"),
        ("10 ** 400", "OverflowError"),
        ("__import__('sys').exit(1)", "SystemExit"),
        ("spin()", "without a verdict"),
        ("9 ** 9 ** 9", "without a verdict"),
        ("__import__('time').sleep(1000)", "without a verdict"),
        ("os._exit(0)", "without a verdict"),
        ("os.kill(os.getpid(), 9)", "without a verdict"),
        ("[os.write(file, b'x' * 9000) for file in range(3, 9) if tried(lambda: os.fstat(file))]", "without a verdict"),
        ("os.closerange(0, 64)", "without a verdict"),
    ],
)
def test_an_answer_without_a_verdict_is_told_and_the_next_one_is_judged(
    verifier: Verifier, answer: str, why: str
) -> None:
    with pytest.raises(NoVerdictError, match=why):
        verifier.score(answer=answer)
    assert verifier.score(answer="1") == 1.0


def test_answers_that_never_end_do_not_keep_others_waiting_for_good(verifier: Verifier) -> None:
    found: list[float] = []

    def judge(answer: str) -> None:
        try:
            found.append(verifier.score(answer=answer))
        except NoVerdictError:
            found.append(math.nan)

    threads = [threading.Thread(target=judge, args=(answer,)) for answer in ["spin()"] * 6 + ["1", "2"]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and {1.0, 2.0} < {*found}


def test_a_verifier_that_cannot_be_imported_or_has_ended_says_so() -> None:
    with pytest.raises(SandboxError, match="No module named 'not_there'"):
        Verifier("import not_there")
    started = Verifier("def judge():\n    return 1")
    inside = psutil.Process(started.process.pid).children(recursive=True)
    started.process.kill()
    assert psutil.wait_procs(inside, timeout=60)[1] == []
    with pytest.raises(SandboxError, match="the sandbox of the verifier has ended"):
        started.score()
