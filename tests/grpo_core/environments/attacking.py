"""An environment whose tools do what they should not. What they start, they write into the row's file."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil


class Attacking:
    def reset(self, path: str, **row: Any) -> None:
        self.path, self.row = path, row
        _mark(self.path, os.getpid())

    def daemon(self) -> str:
        """Leaves a process that has a session and a parent of its own."""
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                _mark(self.path, os.getpid())
                time.sleep(1000)
            os._exit(0)
        os.wait()
        return "left"

    def close_everything(self) -> str:
        """Closes all files."""
        os.closerange(0, 256)
        return "closed"

    def write_everywhere(self, text: str) -> str:
        """Writes into all sockets.

        Args:
            text: What to write.
        """
        for file in range(3, 256):
            try:
                with socket.socket(fileno=os.dup(file)) as found:
                    found.sendall(text.encode())
            except OSError:
                continue
        return "written"

    def print_megabytes(self) -> str:
        """Prints much."""
        with Path(os.devnull).open("w") as sink:
            os.dup2(sink.fileno(), 1)  # the log of the tests stays readable
        print("x" * 2**24)
        return "printed"

    def stop(self) -> str:
        """Stops its process."""
        os.kill(os.getpid(), signal.SIGSTOP)
        return "stopped"

    def ignore_signals(self) -> str:
        """Ignores what can be ignored."""
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            try:
                signal.signal(number, signal.SIG_IGN)
            except (OSError, ValueError):
                continue
        time.sleep(1000)
        return ""

    def exhaust_memory(self) -> str:
        """Takes all memory."""
        return str(len(bytearray(2**40)))

    def crash(self) -> str:
        """Reads where nothing is."""
        return ctypes.string_at(0).decode()

    def spawn(self, count: int) -> str:
        """Starts processes.

        Args:
            count: How many.
        """
        for _ in range(count):
            if os.fork() == 0:
                os.setsid()
                _mark(self.path, os.getpid())
                time.sleep(1000)
        return "spawned"

    def return_twice(self) -> str:
        """Forks, and returns in both."""
        os.fork()
        return "returned"

    def leave(self) -> str:
        """Exits."""
        sys.exit(3)

    def end_starter(self) -> str:
        """Ends the process that starts environments."""
        os.kill(psutil.Process(os.getppid()).ppid(), signal.SIGKILL)
        time.sleep(1000)
        return ""

    def end_keeper(self) -> str:
        """Ends its parent."""
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(1000)
        return ""

    def child(self) -> str:
        """Runs a program."""
        return subprocess.run(["/bin/echo", "said"], capture_output=True, text=True, check=True).stdout

    def surrogate(self) -> str:
        """Raises half of a character."""
        raise ValueError("\ud800\0")

    def seen(self) -> str:
        """Says what the row holds."""
        return repr({column: value for column, value in self.row.items() if column not in ("prompt", "environment")})


def _mark(path: str, process: int) -> None:
    with Path(path).open("a") as file:
        file.write(f"{process}\n")


class Hanging:
    def __init__(self, here: bool = False) -> None:
        while here:
            time.sleep(1000)

    def reset(self, path: str, **row: Any) -> None:
        _mark(path, os.getpid())
        time.sleep(1000)


class Deep:
    """What a reward reads of it is no JSON."""

    def reset(self, **row: Any) -> str:
        self.found: Any = []
        for _ in range(100_000):
            self.found = [self.found]
        self.object, self.half = object(), "\ud800"
        return "\0 é"
