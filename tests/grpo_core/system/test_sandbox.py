"""Attacks on the sandbox, each for real, and by what it is stopped; docs/explanation/security.md tells of them.

Where an attack would do no harm, it is tried without the sandbox too, and works: so it is one.
"""

from __future__ import annotations

import fcntl
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil
import pytest

from grpo_core.system.sandbox import bubblewrap as sandbox
from grpo_core.system.sandbox.bubblewrap import Call, Input, Limits, SandboxError, ask, require
from grpo_core.system.sandbox.seccomp import MACHINES, ONLY, REFUSED, build_filter
from tests.grpo_core.system.attacks import ATTACKS

pytestmark = [pytest.mark.served, pytest.mark.needs("bwrap")]

LIMITS = Limits(cpu_seconds=1, wall_seconds=300.0)  # the machine may be busy: what ends in these tests ends by itself
MIB = 1 << 20


def answer(expression: str, program: str = ATTACKS, limits: Limits = LIMITS, how: Any = "bubblewrap") -> Any:
    return ask(program, [Call(expression)], limits, how)[0]


@pytest.fixture
def marker() -> Iterator[str]:
    """A name for processes; none that has it is left at the end, SIGKILL or not."""
    name = uuid4().hex[:15]
    yield name
    _, alive = psutil.wait_procs(named(name), timeout=60)
    assert alive == []


def named(name: str) -> list[psutil.Process]:
    return [process for process in psutil.process_iter(["name"]) if process.info["name"] == name]


def test_a_program_answers_with_data_of_every_kind() -> None:
    program = "def same(x):\n    return x\n"
    value = [1, -2.5, True, None, "é\n\ud800", (1, (2,)), {3, 4}, {"a": [1], (1, 2): {}}, float("inf"), 10**30]
    assert answer(f"same({value!r})".replace("inf", "float('inf')"), program) == value
    assert list(answer("(x * x for x in range(4))", program)) == [0, 1, 4, 9]
    assert ask("print(input() + '!')", [Input("a\n"), Input("é")], LIMITS, "bubblewrap") == ["a!\n", "é!\n"]


@pytest.mark.parametrize(
    "path",
    [
        *("/etc/passwd", "/etc/shadow", "/etc/hostname", "/root/.bashrc", "/root/.ssh/id_rsa", "/home", __file__),
        *("/proc/1/environ", "/proc/self/environ", "/proc/1/root/etc/passwd", "/sys/class/net", "/var/log", "/run"),
        *("/dev/mem", "/dev/kmsg", "/dev/vda", "/mnt/lib", "/oldroot/etc/passwd", "/tmp/.X11-unix"),
    ],
)
def test_nothing_of_the_host_can_be_read(path: str) -> None:
    assert answer(f"read({path!r})") == "No such file or directory"


def test_a_secret_on_disk_or_in_the_environment_stays_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "key").write_text("secret")
    (tmp_path / "key").chmod(0o644)
    monkeypatch.setenv("JUDGE_API_KEY", "secret")
    assert answer(f"read({str(tmp_path / 'key')!r})", how="none") == "secret"
    assert answer(f"read({str(tmp_path / 'key')!r})") == "No such file or directory"
    assert set(answer("dict(os.environ)")) <= {"LC_CTYPE", "PWD"}
    packages = next(path for path in sys.path if path.endswith("site-packages"))
    assert answer(f"tried(lambda: os.listdir({packages!r}))") == "No such file or directory"


@pytest.mark.parametrize("path", ["/x", "/usr/lib/x", "/dev/x", "/dev/shm/x", "/etc/x", sys.base_prefix + "/lib/x"])
def test_nothing_can_be_written_outside_the_scratch_folder(path: str) -> None:
    assert answer(f"write({path!r})") == "Read-only file system"
    assert not Path(path).exists()


def test_writing_to_the_host_fails_and_the_scratch_folder_is_small_and_gone_afterwards(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    target = tmp_path / "written"
    assert answer(f"write({str(target)!r})") == "No such file or directory"
    assert not target.exists()
    assert answer(f"write({str(target)!r})", how="none") == 4
    assert target.read_text() == "here"
    assert answer("write('/tmp/left')") == 4
    assert answer("os.listdir('/tmp')") == []
    assert answer("fill('/tmp')") == (LIMITS.scratch_mib * MIB, "No space left on device")
    assert answer("fill('/dev/shm')") == (0, "Read-only file system")


def test_no_socket_can_be_opened() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert answer(f"connect(2, ('127.0.0.1', {port}))", how="none") is None
        assert answer(f"connect(2, ('127.0.0.1', {port}))") == "Operation not permitted"
    name = f"\0{uuid4()}"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(name)
        server.listen()
        assert answer(f"connect(1, {name!r})", how="none") is None
        assert answer(f"connect(1, {name!r})") == "Operation not permitted"
    families = [socket.AF_INET6, socket.AF_NETLINK, socket.AF_PACKET, socket.AF_ALG, socket.AF_VSOCK]
    for answered in ask(ATTACKS, [Call(f"connect({int(f)}, None)") for f in families], LIMITS, "bubblewrap"):
        assert answered == "Operation not permitted"


def test_the_network_namespace_is_empty_behind_the_filter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_core.system.sandbox.seccomp.REFUSED", {})
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert answer(f"connect(2, ('127.0.0.1', {server.getsockname()[1]}))") == "Connection refused"
    assert answer("connect(2, ('192.0.2.1', 80))") == "Network is unreachable"
    assert answer("tried(lambda: [name for _, name in __import__('socket').if_nameindex()])") == ["lo"]


@pytest.mark.skipif(os.uname().machine not in MACHINES, reason="the numbers of this machine's calls are not known")
@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_system_call_is(name: str) -> None:
    column, _ = MACHINES[os.uname().machine]
    assert answer(f"call({REFUSED[name][column]}, 0, 0, 0, 0, 0)") == "Operation not permitted"


def test_a_call_gets_its_one_argument_alone() -> None:
    pair = "tried(lambda: __import__('socket').socketpair({}) and 'made')"
    limit = "tried(lambda: __import__('resource').prlimit({}, 0) and 'told')"
    assert answer(pair.format(int(socket.AF_UNIX))) == "made"
    assert answer(pair.format(int(socket.AF_VSOCK))) == "Operation not permitted"
    assert answer(limit.format(0)) == "told"
    assert answer(limit.format(1)) == "Operation not permitted"


@pytest.mark.parametrize(
    ("machine", "header"),
    [("x86_64", "x86_64-linux-gnu/asm/unistd_64.h"), ("aarch64", "asm-generic/unistd.h")],
)
def test_the_numbers_of_system_calls_are_those_of_the_kernels_headers(machine: str, header: str) -> None:
    path = Path("/usr/include") / header
    if not path.exists():
        pytest.skip(f"{path} is not installed")
    known = dict(re.findall(r"^#define __NR(?:3264)?_(\w+)\s+(\d+)", path.read_text(), re.MULTILINE))
    column, _ = MACHINES[machine]
    filtered = REFUSED | {name: numbers[:2] for name, numbers in ONLY.items()}
    assert {name: int(known[name]) for name in filtered if name in known} == {
        name: numbers[column] for name, numbers in filtered.items() if name in known
    }
    assert len(build_filter(machine)) == 8 * (len(REFUSED) + 5 * len(ONLY) + 7)


def test_calls_of_another_architecture_kill(tmp_path: Path) -> None:
    """32-bit calls have other numbers: int 0x80 would get past a filter that looked at numbers alone."""
    if os.uname().machine != "x86_64":
        pytest.skip("x86-64 only")
    program = """
def getpid32():
    import ctypes, mmap
    code = mmap.mmap(-1, 4096, prot=7)
    code.write(bytes([0x53, 0xB8, 20, 0, 0, 0, 0xCD, 0x80, 0x5B, 0xC3]))  # push rbx; mov eax, 20; int 0x80; pop; ret
    return ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))()
"""
    assert answer("getpid32()", program) is ...


def test_a_program_has_no_privileges_and_gets_none() -> None:
    assert 0 not in answer("[os.getuid(), os.geteuid(), os.getgid(), *os.getgroups()]")
    assert answer("tried(lambda: os.setuid(0))") in ("Operation not permitted", "Invalid argument")
    assert answer("call(165, None, b'/tmp', b'tmpfs', 0, None)") == "Operation not permitted"  # mount
    assert answer("tried(lambda: os.chroot('/tmp'))") == "Operation not permitted"
    assert answer("tried(lambda: os.nice(-5))") == "Operation not permitted"
    new_user_namespace = 0x10000000 | signal.SIGCHLD
    assert answer(f"call(56, {new_user_namespace}, 0, 0, 0, 0)") != "done"  # clone
    assert answer("tried(lambda: os.execv('/bin/sh', ['sh', '-c', 'id']))") == "No such file or directory"


def test_an_endless_loop_costs_its_own_test_only() -> None:
    ignoring = f"{ATTACKS}\nimport signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\n"
    assert ask(ignoring, [Call("1"), Call("spin()"), Call("2")], LIMITS, "bubblewrap") == [1, ..., 2]
    assert ask("import re\nre.match('(a+)+$', 'a' * 50 + 'b')", [Input("")], LIMITS, "bubblewrap") == [...]


def test_sleeping_is_ended_too(marker: str) -> None:
    limits = Limits(wall_seconds=3.0)
    assert answer(f"mark({marker!r}) or __import__('time').sleep(1000)", limits=limits) is ...


def test_a_fork_bomb_makes_a_few_processes_that_end_with_it(marker: str) -> None:
    made, why = answer(f"forks({marker!r})")
    assert (made, why) == (LIMITS.processes - 3, "Resource temporarily unavailable")
    assert answer("threads()") == LIMITS.processes - 3


def test_a_fork_bomb_of_one_test_leaves_room_for_the_next(marker: str) -> None:
    alone = answer(f"forks({marker!r})")
    for _ in range(3):
        assert ask(ATTACKS, [Call("forks('')")] * 4, LIMITS, "bubblewrap") == [alone] * 4


def test_a_daemon_ends_with_the_sandbox(marker: str) -> None:
    assert answer(f"daemon({marker!r})") == "left"


def test_without_a_sandbox_a_daemon_that_holds_the_answers_open_does_not_hold_up_the_reader(marker: str) -> None:
    program = f"{ATTACKS}\ndaemon({marker!r})"
    assert answer("1", program, Limits(wall_seconds=3.0), "none") == 1
    [left] = named(marker)
    left.kill()


def test_answers_are_read_from_a_descriptor_above_1023() -> None:
    """A training that holds many files open has such descriptors, which select(2) does not take."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= hard < 4096:  # below 0: no limit
        pytest.skip(f"the hard limit of open files is {hard}")
    low, writing = os.pipe()
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, hard))
    try:
        high = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, 1024)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    with os.fdopen(low), os.fdopen(high), os.fdopen(writing, "w") as program:
        print("an answer", end="", file=program, flush=True)
        assert sandbox.read(high, 6, time.monotonic() + 60) == b"an ans", "no more than was asked for"
        program.close()
        assert sandbox.read(high, 100, time.monotonic() + 60) == b"wer", "to the end"


def test_the_sandbox_ends_when_the_training_is_killed(marker: str) -> None:
    call = f"mark({marker!r}) or __import__('time').sleep(1000)"
    script = "from grpo_core.system.sandbox.bubblewrap import *\n"
    script += f"ask({ATTACKS!r}, [Call({call!r})], Limits(wall_seconds=1000.0), 'bubblewrap')"
    with subprocess.Popen([sys.executable, "-c", script]) as training:
        while not named(marker):
            assert training.poll() is None
        (program,) = named(marker)
        seen = Path(f"/proc/{program.pid}")
        assert (seen / "oom_score_adj").read_text() == "1000\n"  # where memory runs out, it goes first
        assert program.uids().real == (os.geteuid() or sandbox.NOBODY)
        training.kill()


@pytest.mark.parametrize(
    "program",
    [
        "x = bytearray(1 << 30)",
        "x = []\nwhile True: x.append('x' * len(x))",
        pytest.param("x = 10 ** 10 ** 9", marks=pytest.mark.e2e),
        "import mmap\nx = mmap.mmap(-1, 1 << 30)",
        "exec('[' * 10 ** 6)",
    ],
)
def test_a_memory_bomb_is_refused_the_memory(program: str) -> None:
    assert ask(program + "\nprint('got it')", [Input("")], LIMITS, "bubblewrap") == [...]


def test_memory_that_no_limit_counts_cannot_be_had() -> None:
    assert answer("tried(lambda: os.memfd_create('x'))") == "Operation not permitted"
    shared = "__import__('multiprocessing.shared_memory').shared_memory.SharedMemory(create=True, size=10**6)"
    assert answer(f"tried(lambda: {shared})") == "Read-only file system"
    if os.geteuid() == 0:
        made, why = answer("files('/tmp')")
        assert made < sandbox.SCRATCH_FILES and why == "No space left on device"
    else:
        assert answer("files('/tmp')") is ...


@pytest.mark.parametrize(
    "program",
    [
        "while True: print('x' * 10**6)",
        "import os\nwhile True: os.write(2, b'x' * 10**6)",
        "import os\nwhile True:\n    for out in range(3, 9):\n        try: os.write(out, b'0 ' + b'x' * 10**6)\n"
        "        except OSError: pass",
        "print('x' * 10**6)",
    ],
)
def test_gigabytes_of_output_do_not_arrive(program: str) -> None:
    tracemalloc.start()
    try:
        assert ask(program, [Input("")], LIMITS, "bubblewrap") == [...]
        assert tracemalloc.get_traced_memory()[1] < 2 * MIB
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "text",
    [
        *("[" * 60_000, '["list", ' * 5_000, '["set", ["list"]]', '["dict", 5]', '["eval", "1"]', "[]", "9" * 60_000),
        *("{}x", "", "\\xff", '["dict", ["tuple", ["list"], 1]]', "1" + "\\n-1 5\\n7 5\\nx 5"),
    ],
)
def test_answers_forged_to_break_their_reader_are_no_answers_or_data(text: str) -> None:
    program = f"import os\nfor out in range(3, 9):\n    try: os.write(out, b'0 ' + {text!r}.encode() + b'\\n')\n"
    program += "    except OSError: pass\nos._exit(0)"
    assert ask(program.replace("\\\\", "\\"), [Input(""), Input("")], LIMITS, "bubblewrap") in ([..., ...], [1, ...])


@pytest.mark.parametrize(
    "attack",
    [
        "os.kill(os.getppid(), 9)",
        "os.kill(1, 9)",
        "os.kill(-1, 9)",
        "os.killpg(0, 9)",
        "[os.kill(number, 9) for number in range(2, 50)]",
    ],
)
def test_killing_ends_the_programs_own_run_only(attack: str) -> None:
    bystander = subprocess.Popen(["sleep", "1000"], user=sandbox.NOBODY if os.geteuid() == 0 else None)
    try:
        questions = [Call("1"), Call(f"tried(lambda: {attack})")]
        assert ask(ATTACKS, questions, LIMITS, "bubblewrap")[0] == 1
        assert bystander.poll() is None
        assert answer("2") == 2
    finally:
        bystander.kill()
        bystander.wait()


def test_what_one_test_spoils_the_next_does_not_see() -> None:
    program = "import builtins\nstate = []\n"
    program += "def spoil():\n    state.append(1)\n    builtins.len = lambda x: 7\n    return len(state)"
    assert ask(program, [Call("spoil()"), Call("spoil()"), Call("len(state)")], LIMITS, "bubblewrap") == [7, 7, 0]


def test_who_is_not_root_has_the_same_sandbox() -> None:
    python = "/usr/bin/python3"  # the interpreter of these tests may be root's alone
    recent = subprocess.run([python, "-c", "import sys; assert sys.version_info >= (3, 11)"], capture_output=True)
    if os.geteuid() != 0 or recent.returncode != 0:
        pytest.skip("needs root, and a system Python of 3.11 or later")
    questions = (
        "[Call('forks(str())'), Call('[os.getuid(), os.getppid()]'), Call('write(\"/x\")'), Call('files(\"/tmp\")')]"
    )
    script = "from grpo_core.system.sandbox.bubblewrap import *\nrequire('bubblewrap')\n"
    script += f"print(ask({ATTACKS!r}, {questions}, Limits(cpu_seconds=1, wall_seconds=300.0), 'bubblewrap'))"
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        shutil.copytree(Path(sandbox.__file__).parent, Path(folder) / "grpo_core" / "system" / "sandbox")
        environment = {"PYTHONPATH": folder, "PATH": os.environ["PATH"]}
        command = [python, "-c", script]
        done = subprocess.run(command, env=environment, user=1234, group=1234, extra_groups=[], capture_output=True)
    assert done.stderr == b""
    forks = (LIMITS.processes - 3, "Resource temporarily unavailable")
    assert done.stdout.decode().strip() == str([forks, [1234, 2], "Read-only file system", ...])


def test_where_there_is_no_sandbox_nothing_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SandboxError, match=r"sandbox='docker' is none of bubblewrap, none"):
        require("docker")  # type: ignore[arg-type]
    first = tmp_path / "choom"  # of the command that makes the sandbox
    first.write_text("#!/bin/sh\necho 'setting up uid map: Permission denied' >&2\nexit 1\n")
    first.chmod(0o755)
    require.cache_clear()
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(SandboxError, match=r"no sandbox: setting up uid map: Permission denied; .*sandbox = \"none\""):
        require("bubblewrap")
    with pytest.raises(SandboxError, match="setting up uid map"):  # in mid-run: no answer of the program's, so no score
        answer("1")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SandboxError, match=r"bwrap \(of Debian's bubblewrap\).* not found"):
        require("bubblewrap")
    require("none")
