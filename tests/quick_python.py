"""A `python` whose processes are forked from one that has imported what they will import: that takes more CPU time than
what a cut-down benchmark then does."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import importlib
import json
import multiprocessing
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from benchmarks.command import ROOT, python_path

# A program's first lines, by which a Python whose path has a space runs it, since a `#!` line holds no such path: to a
# shell the second is a command, to Python a text.
BY_SHELL = """#!/bin/sh
'''exec' "{python}" -IS "$0" "$@"
' '''
"""
# Hands its arguments, folder, environment and open files to the process that forks, and ends as the forked one does.
STARTED = """import json, os, signal, socket, sys
arguments = sys.argv[1:]
while arguments[0] not in ("-m", "-c") and arguments[0].startswith("-"):
    arguments = arguments[1:]  # such as the -B of multiprocessing
files = []
for number in map(int, os.listdir("/proc/self/fd")):
    try:
        if os.get_inheritable(number):
            files.append(number)
    except OSError:  # the listing's own
        pass
process = socket.socket(socket.AF_UNIX)
process.connect({address!r})
message = json.dumps([files, arguments, os.getcwd(), dict(os.environ)]).encode()
socket.send_fds(process, [len(message).to_bytes(4, "big")], files)
process.sendall(message)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, _: process.send(bytes([number])))
status = process.recv(1)
if not status:
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(status[0])
"""


@contextmanager
def quick_python(folder: Path, modules: Sequence[str], again: bool = True) -> Iterator[Path]:
    """An executable in `folder` that runs `-m MODULE`, `-c CODE` and files, in processes that have these modules
    already, those that are installed. If `again`, those processes in turn start others by it."""
    address, program, log = folder / "address", folder / "python", folder / "log"
    program.write_text(BY_SHELL.format(python=sys.executable) + STARTED.format(address=str(address)))
    program.chmod(0o755)
    executable = str(program) if again else sys.executable
    command = [sys.executable, "-m", "tests.quick_python", str(address), executable, *modules]
    environment = os.environ | {"PYTHONPATH": python_path(ROOT)}
    with log.open("w") as output:
        server = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=output)
    try:
        assert server.stdout
        if not server.stdout.readline():
            raise RuntimeError(log.read_text())
        yield program
    finally:
        server.kill()
        server.communicate()


def main() -> None:
    address, executable, *modules = sys.argv[1:]
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    gc.disable()
    for module in modules:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(module)
    gc.freeze()
    gc.enable()
    sys.executable = executable
    multiprocessing.set_executable(executable)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # those that end need not be waited for
    listener.listen(64)
    print("ready", flush=True)
    while True:
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _fork(connection)
        connection.close()


def _fork(connection: socket.socket) -> None:
    """Fork the process that is asked for, pass signals on to it, and tell its exit status. It is killed if its starter
    ends first."""
    size, received, *_ = socket.recv_fds(connection, 4, 250)
    message = b""
    while len(message) < int.from_bytes(size, "big"):
        message += connection.recv(2**20)
    files, *program = json.loads(message)
    child = os.fork()
    if child == 0:
        connection.close()
        os.setsid()
        above = max(files) + 1  # first beyond all numbers that are wanted, so that none is overwritten
        moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, above) for descriptor in received]
        for number, descriptor in zip(files, moved, strict=True):
            os.dup2(descriptor, number)
        os.closerange(above, 1024)
        _run(*program)
    for descriptor in received:
        os.close(descriptor)
    ended = os.pidfd_open(child)
    while ended not in (ready := select.select([ended, connection], [], [])[0]):
        assert ready
        if not (number := connection.recv(1)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
            os._exit(0)
        os.kill(child, number[0])
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status >= 0:
        with contextlib.suppress(BrokenPipeError):
            connection.send(bytes([status]))
    os._exit(0)


def _run(arguments: list[str], folder: str, environment: dict[str, str]) -> None:
    """Do what `python ARGUMENTS` does, and end the process."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = [place for place in environment.get("PYTHONPATH", "").split(os.pathsep) if place not in sys.path]
    status = 1
    try:
        if arguments[0] == "-c":
            sys.argv, sys.modules["__main__"] = ["-c", *arguments[2:]], ModuleType("__main__")
            exec(arguments[1], {"__name__": "__main__"})
        elif arguments[0] == "-m":
            sys.argv = arguments[1:]
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = arguments
            runpy.run_path(arguments[0], run_name="__main__")
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
