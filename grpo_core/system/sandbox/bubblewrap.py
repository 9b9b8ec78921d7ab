"""Run an unreviewed program: bubblewrap's namespaces, limits of the kernel, a filter of system calls.

tests/grpo_core/system/test_sandbox.py attacks it; docs/explanation/security.md says what holds. The program and the
questions to it go in, answers come out as data; whether they are right is decided elsewhere (`builtin.code_tests`).
"""

from __future__ import annotations

import json
import marshal
import os
import select
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

from grpo_core.system.sandbox.seccomp import MACHINES, build_filter

Sandbox = Literal["bubblewrap", "none"]
NOBODY = 65534
NEEDED = {"bwrap": "bubblewrap", "mkdir": "coreutils", "mount": "mount"} | dict.fromkeys(
    ("choom", "setpriv", "unshare"), "util-linux"
)
SCRATCH_FILES = 4096  # most files of the scratch folder: each costs the kernel about 1 KiB that no other limit counts
WATCH_SECONDS = 0.05
LINE = 32  # bytes of an answer's line other than the answer
STARTED = b"started \n"
ESCAPE = (
    "; without a sandbox the completions' code may do everything that you may: where that is acceptable, as in its own "
    'container without network, set args = { sandbox = "none" }'
)
PYTHON = Path(sys.executable).resolve()  # without the environment's packages
PREFIX = Path(sys.base_prefix).resolve()
KINDS: dict[str, Any] = {"list": list, "tuple": tuple, "set": frozenset, "dict": dict, "iterator": iter}
INSIDE = Path(__file__).with_name("inside.py").read_text()


class SandboxError(RuntimeError):
    """No sandbox is available; the message says why and what to do."""


@dataclass(frozen=True)
class Limits:
    """Resources of a program. `cpu_seconds` and `output_kib` are per question, the others for all questions together.

    `memory_mib` is the address space per process; `processes` counts threads too, and the sandbox's own three.
    """

    cpu_seconds: int = 2
    wall_seconds: float = 20.0
    memory_mib: int = 256
    processes: int = 8
    output_kib: int = 64
    scratch_mib: int = 16


@dataclass(frozen=True)
class Call:
    """A question: the value of an expression among the program's own names."""

    expression: str


@dataclass(frozen=True)
class Input:
    """A question: what the program prints when this is its standard input."""

    text: str


def ask(program: str, questions: Sequence[Call | Input], limits: Limits, sandbox: Sandbox) -> list[Any]:
    """The program's answer to each question, `...` if it gives none: values for calls, text for inputs.

    Each question is answered in its own process, in this order, until the time is up. Values are those that literals
    can express, and other iterables as iterators; all are rebuilt from JSON, and none runs code of the program. Raises
    SandboxError if the program could not even be started, which is not the program's fault.
    """
    kinds: dict[str, list[tuple[int, str | bytes]]] = {"calls": [], "inputs": []}
    for number, question in enumerate(questions):
        if isinstance(question, Call):
            kinds["calls"].append((number, question.expression))
        else:
            kinds["inputs"].append((number, question.text.encode()))
    processes = limits.processes if sandbox == "bubblewrap" else None
    kernel = kernel_limits(limits.cpu_seconds, limits.memory_mib, limits.scratch_mib, processes)
    job = marshal.dumps({"program": program, "limits": kernel, **kinds})
    longest = limits.output_kib * 1024
    output, errors = _run(job, limits, sandbox, (1 + len(questions)) * (longest + LINE))
    if not output.startswith(STARTED):
        reason = errors.decode(errors="replace").strip() or f"it had not started after {limits.wall_seconds:g} s"
        raise SandboxError(f"no sandbox: {reason}{'' if sandbox == 'none' else ESCAPE}")
    answers: dict[int, Any] = {}
    for line in output.removeprefix(STARTED).splitlines():
        answered, _, text = line.partition(b" ")
        with suppress(ValueError, TypeError, KeyError, RecursionError):
            if len(text) <= longest:
                answers.setdefault(int(answered), _rebuilt(json.loads(text)))
    return [answers.get(number, ...) for number in range(len(questions))]


def _rebuilt(value: Any) -> Any:
    """The value that inside.py wrote as JSON."""
    if not isinstance(value, list):
        return value
    kind, *items = value
    items = [_rebuilt(item) for item in items]
    return KINDS[kind](items)


@cache
def require(sandbox: Sandbox) -> None:
    """Raises SandboxError if programs cannot be run in this sandbox, which is tried with one."""
    if sandbox not in get_args(Sandbox):
        raise SandboxError(f"sandbox={sandbox!r} is none of {', '.join(get_args(Sandbox))}")
    if sandbox == "none":
        return
    missing = [f"{name} (of Debian's {package})" for name, package in NEEDED.items() if not shutil.which(name)]
    if missing:
        raise SandboxError(f"no sandbox: {', '.join(missing)} not found; install it{ESCAPE}")
    if os.uname().machine not in MACHINES:
        raise SandboxError(f"no sandbox: no filter of system calls for {os.uname().machine}{ESCAPE}")
    if os.geteuid() != 0 and not _children_file(os.getpid()).exists():
        raise SandboxError(f"no sandbox: the kernel shows no children of processes (CONFIG_PROC_CHILDREN){ESCAPE}")
    if ask("", [Call("1")], Limits(), sandbox) != [1]:
        raise SandboxError(f"no sandbox: a program that should answer 1 did not{ESCAPE}")


def _run(job: bytes, limits: Limits, sandbox: Sandbox, max_bytes: int) -> tuple[bytes, bytes]:
    """The first `max_bytes` of the output, and the errors of the programs that start the program."""
    with ExitStack() as stack:
        python = [str(PYTHON), "-I", "-S", "-X", "utf8", "-c", INSIDE]
        if sandbox == "none":
            command, filters, folder = python, [], stack.enter_context(tempfile.TemporaryDirectory())
        else:
            begin, descriptor = stack.enter_context(enclosed(limits.scratch_mib))
            command, filters, folder = [*begin, *python], [descriptor], "/"
        deadline = time.monotonic() + limits.wall_seconds
        process = stack.enter_context(
            subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,  # not the program's, which has none
                env={},  # /proc shows it of every process, whatever that has unset
                cwd=folder,
                pass_fds=filters,
                start_new_session=True,
            )
        )
        stack.callback(kill, process)
        if sandbox == "bubblewrap":
            bound_files(process)
        timer = threading.Timer(limits.wall_seconds, kill, [process])
        stack.callback(timer.cancel)
        timer.start()
        assert process.stdin and process.stdout and process.stderr
        with suppress(BrokenPipeError):
            process.stdin.write(job)
        with suppress(BrokenPipeError):
            process.stdin.close()
        output = read(process.stdout.fileno(), max_bytes, deadline)
        kill(process)
        return output, process.stderr.read()


def read(descriptor: int, max_bytes: int, deadline: float) -> bytes:
    """Read until the output's end or the deadline: without a sandbox, a daemon may live on and hold the pipe open."""
    output, waiting = bytearray(), select.poll()  # select.select takes no descriptor above 1023
    waiting.register(descriptor, select.POLLIN)
    while len(output) < max_bytes and waiting.poll(1000 * max(0.0, deadline - time.monotonic())):
        part = os.read(descriptor, max_bytes - len(output))
        if not part:
            break
        output += part
    return bytes(output)


def kill(process: subprocess.Popen[bytes]) -> None:
    """End bubblewrap, and with it everything in its process namespace."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def bound_files(process: subprocess.Popen[bytes]) -> None:
    """End the sandbox, from now to its end, as soon as its scratch folder holds more than SCRATCH_FILES. As root, the
    folder itself refuses more."""
    if os.geteuid() != 0:
        threading.Thread(target=_watch_files, args=(process,), daemon=True).start()


def _watch_files(process: subprocess.Popen[bytes]) -> None:
    ours = Path("/tmp").stat().st_dev
    while process.returncode is None:
        with suppress(OSError):  # bubblewrap has not started its child yet, or has ended
            for child in _children_file(process.pid).read_text().split():
                scratch = Path(f"/proc/{child}/root/tmp")
                found = os.statvfs(scratch)
                if found.f_files - found.f_ffree > SCRATCH_FILES and scratch.stat().st_dev != ours:
                    kill(process)
        time.sleep(WATCH_SECONDS)


def _children_file(process: int) -> Path:
    return Path(f"/proc/{process}/task/{process}/children")


def kernel_limits(cpu_seconds: int, memory_mib: int, scratch_mib: int, processes: int | None) -> list[tuple[str, int]]:
    """The kernel's limits for a program, by their names. `processes`: None without a user namespace, since the limit
    would count everything that the user runs."""
    return [
        ("RLIMIT_CPU", cpu_seconds),
        ("RLIMIT_AS", memory_mib << 20),
        ("RLIMIT_FSIZE", scratch_mib << 20),
        ("RLIMIT_NOFILE", 64),
        ("RLIMIT_CORE", 0),
        *([("RLIMIT_NPROC", processes)] if processes is not None else []),
    ]


@contextmanager
def enclosed(scratch_mib: int, packages: Sequence[str] = ()) -> Iterator[tuple[list[str], int]]:
    """The beginning of a command that runs in the sandbox, and the descriptor to pass to it (the filter of system
    calls). `scratch_mib`: 0 for nothing that can be written; `packages`: folders of Python packages that it sees."""
    reading, writing = os.pipe()
    try:
        with os.fdopen(writing, "wb") as file:
            file.write(build_filter())
        yield _sandbox_command(reading, scratch_mib, packages), reading
    finally:
        os.close(reading)


def _sandbox_command(filter_descriptor: int, scratch_mib: int, packages: Sequence[str]) -> list[str]:
    """Beginning of a command that sees only the interpreter and packages, read-only, and a scratch /tmp."""
    tool = {name: shutil.which(name) or name for name in NEEDED}
    first = [tool["choom"], "-n", "1000", "--"]  # if memory runs out, this is killed, not the training
    places = {folder: folder for folder in (PREFIX, *map(Path, packages))}
    scratch = ["--size", str(scratch_mib << 20), "--tmpfs", "/tmp"]
    if os.geteuid() == 0:
        # The limit of processes does not bind root; the user `nobody` reaches the interpreter and packages by /mnt.
        places = {folder: Path(f"/mnt/{number}") for number, folder in enumerate(places)}
        scratch = ["--bind", "/mnt/scratch", "/tmp"]
        script = f"{tool['mount']} -t tmpfs -o size={scratch_mib or 1}m,nr_inodes={SCRATCH_FILES} scratch /mnt"
        script += f" && {tool['mkdir']} -m 1777 /mnt/scratch"
        for folder, place in places.items():
            script += f" && {tool['mkdir']} {place} && {tool['mount']} --bind {shlex.quote(str(folder))} {place}"
        first += [tool["unshare"], "--mount", "/bin/sh", "-c", f'{script} && exec "$0" "$@"', tool["setpriv"]]
        first += ["--pdeathsig", "KILL", "--clear-groups", "--reuid", str(NOBODY), "--regid", str(NOBODY)]
    first += [tool["bwrap"], "--unshare-all", "--unshare-user", "--disable-userns", "--cap-drop", "ALL"]
    first += ["--die-with-parent", "--new-session", "--seccomp", str(filter_descriptor)]
    for folder in ("/usr/lib", "/usr/lib64", "/lib", "/lib64"):
        if Path(folder).is_symlink():
            first += ["--symlink", str(Path(folder).readlink()), folder]
        else:
            first += ["--ro-bind-try", folder, folder]
    first += ["--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]
    for part in (PYTHON.relative_to(PREFIX), Path("lib")):
        first += ["--ro-bind", str(places[PREFIX] / part), str(PREFIX / part)]
    own = Path(sysconfig.get_path("purelib", vars={"base": str(PREFIX)}))
    if own.is_relative_to(PREFIX / "lib") and own.is_dir():
        first += ["--tmpfs", str(own), "--remount-ro", str(own)]
    first += ["--dev", "/dev", "--remount-ro", "/dev"]
    first += scratch if scratch_mib else ["--dir", "/tmp"]
    for folder in map(Path, packages):
        first += ["--ro-bind", str(places[folder]), str(folder)]
    return [*first, "--chdir", "/tmp", "--remount-ro", "/", "--"]
