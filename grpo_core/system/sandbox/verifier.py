"""Somebody else's verifier in the sandbox, since it may evaluate the answers that it is given: imported once, then one
process per judgement. Requests go in pickled, and a number comes out as text.

An answer that takes over its judgement's process can forge that verdict, and end those that run beside it; it reaches
nothing else.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import socket
import subprocess
import sysconfig
from contextlib import suppress
from pathlib import Path
from typing import Any

from grpo_core.system.sandbox.bubblewrap import ESCAPE, PYTHON, SandboxError, enclosed, kill, require

INSIDE = Path(__file__).with_name("inside_verifier.py").read_text()
START_SECONDS = 120.0
CPU_SECONDS = 2  # per judgement, as all that follow
WALL_SECONDS = 5.0  # allow for twice as many judgements at a time as there are cores
MEMORY_MIB = 512  # of address space, beside that of the imports
LONGEST_VERDICT = 1 << 12  # bytes
THREADS = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"), "1")  # a judgement may start none


class NoVerdictError(Exception):
    """The verifier gave no verdict about this answer; the message says why."""


class Verifier:
    """A process in the sandbox that has run `source`, which defines the function `judge`. Processes forked from the one
    that made it may use it too. It ends with the last of them, and with the one that made it."""

    def __init__(self, source: str) -> None:
        """Raises SandboxError if there is no sandbox, or `source` raises in it."""
        try:
            require("bubblewrap")
        except SandboxError as error:
            raise SandboxError(str(error).removesuffix(ESCAPE)) from None
        packages = list(dict.fromkeys(sysconfig.get_path(kind) for kind in ("purelib", "platlib")))
        setup = {
            "source": source,
            "packages": packages,
            "together": 2 * len(os.sched_getaffinity(0)),
            "wall_seconds": WALL_SECONDS,
            "memory": MEMORY_MIB << 20,
            "limits": [
                ("RLIMIT_CPU", CPU_SECONDS),
                ("RLIMIT_FSIZE", 0),
                ("RLIMIT_NOFILE", 64),
                ("RLIMIT_CORE", 0),
                ("RLIMIT_NPROC", 0),
            ],
        }
        self.control, theirs = socket.socketpair()
        python = [str(PYTHON), "-I", "-S", "-X", "utf8", "-W", "ignore", "-c", INSIDE, json.dumps(setup)]
        with theirs, enclosed(0, packages) as (command, filters):
            self.process = subprocess.Popen(
                [*command[:-1], "--as-pid-1", "--", *python],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env=THREADS,
                cwd="/",
                pass_fds=[filters],
                start_new_session=True,
            )
        self.control.settimeout(START_SECONDS)
        with suppress(OSError):
            if self.control.recv(1):
                self.control.settimeout(None)
                return
        kill(self.process)
        assert self.process.stderr
        reason = self.process.stderr.read().decode(errors="replace").strip() or "it had not started in time"
        raise SandboxError(f"a verifier in the sandbox has not started: {reason}")

    def score(self, **request: Any) -> float:
        """Return `judge(**request)`. Raises NoVerdictError if that raises, returns no finite number, takes too long or
        ends its process; SandboxError if the sandbox has ended."""
        mine, theirs = socket.socketpair()
        with mine:
            try:
                with theirs:
                    socket.send_fds(self.control, [b"."], [theirs.fileno()])
            except OSError as error:
                raise SandboxError(f"the sandbox of the verifier has ended: {error}") from error
            with suppress(OSError):  # it has ended: there will be no verdict
                mine.sendall(pickle.dumps(request))
                mine.shutdown(socket.SHUT_WR)
            kind, _, text = _read(mine).decode(errors="replace").partition(" ")
        if kind == "score":
            with suppress(ValueError):
                if math.isfinite(score := float(text)):
                    return score
        if kind in ("score", "raised"):
            raise NoVerdictError(text)
        raise NoVerdictError(
            f"the verifier's process ended without a verdict; it may take {CPU_SECONDS} s of processor time, "
            f"{WALL_SECONDS:g} s in all and {MEMORY_MIB} MiB"
        )


def _read(connection: socket.socket) -> bytes:
    """The connection's first LONGEST_VERDICT bytes, or all until its end."""
    parts = b""
    with suppress(OSError):
        while len(parts) < LONGEST_VERDICT and (part := connection.recv(LONGEST_VERDICT)):
            parts += part
    return parts
