"""An unreviewed interpreter that lives on between pieces of code: its variables are kept, until it is closed or ends.

The sandbox is that of `bubblewrap`. Its output is text, limited in length and time.
"""

from __future__ import annotations

import marshal
import os
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from grpo_core.system.sandbox.bubblewrap import PYTHON, SandboxError, bound_files, enclosed, kernel_limits, kill, read

INSIDE = Path(__file__).with_name("inside_session.py").read_text()
LONGEST_CODE = 1 << 15  # bytes: half of what a pipe holds, so that writing never waits
START_SECONDS = 60.0
LONGEST_ERROR = 10_000  # bytes


@dataclass(frozen=True)
class SessionLimits:
    """Resources of a session. `cpu_seconds`, `wall_seconds` and `characters` (of output) are per call,
    `total_cpu_seconds` and `memory_mib` (address space) per process of the code, the others for the whole session."""

    cpu_seconds: int = 10
    wall_seconds: float = 20.0
    characters: int = 8000
    total_cpu_seconds: int = 300
    memory_mib: int = 512
    processes: int = 8  # threads too, and the sandbox's own three
    scratch_mib: int = 16


class Session:
    """One interpreter in its sandbox. It ends with `close`, and with the process that holds it."""

    def __init__(self, limits: SessionLimits) -> None:
        """Raises SandboxError if it does not start."""
        self.limits = limits
        with enclosed(limits.scratch_mib) as (command, filters):
            self.process = subprocess.Popen(
                [*command, str(PYTHON), "-I", "-S", "-X", "utf8", "-c", INSIDE],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,  # not the code's
                env={},
                cwd="/",
                pass_fds=[filters],
                start_new_session=True,
            )
        bound_files(self.process)
        kernel = kernel_limits(limits.total_cpu_seconds, limits.memory_mib, limits.scratch_mib, limits.processes)
        job = {"kernel": kernel, "cpu_seconds": limits.cpu_seconds, "characters": limits.characters}
        self._send(marshal.dumps(job))
        if self._receive(time.monotonic() + START_SECONDS) != b"started":
            kill(self.process)
            assert self.process.stderr
            reason = self.process.stderr.read().decode(errors="replace").strip() or "it had not started in time"
            self.close()
            raise SandboxError(f"no sandbox: {reason}")

    def run(self, code: str) -> str | None:
        """Return what the code prints, its last expression's value, or the traceback it ends in; None if the
        interpreter has ended with it, or was ended because its time was up."""
        deadline = time.monotonic() + self.limits.wall_seconds
        self._send(code.encode(errors="surrogatepass"))
        text = self._receive(deadline)
        if text is None:
            self.close()
        return None if text is None else text.decode(errors="replace")

    def close(self) -> None:
        """End the interpreter and all that it has started."""
        kill(self.process)
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            with suppress(OSError):
                assert pipe
                pipe.close()
        self.process.wait()

    def _send(self, body: bytes) -> None:
        assert self.process.stdin
        with suppress(OSError):  # it has ended, or reads nothing: there will be no answer
            os.set_blocking(self.process.stdin.fileno(), False)
            os.write(self.process.stdin.fileno(), len(body).to_bytes(4, "big") + body)

    def _receive(self, deadline: float) -> bytes | None:
        """The next frame; None if it does not come in time, is too long, or the output has ended."""
        assert self.process.stdout
        file = self.process.stdout.fileno()
        head = read(file, 4, deadline)
        size = int.from_bytes(head, "big")
        if len(head) < 4 or size > 4 * self.limits.characters + LONGEST_ERROR:
            return None
        body = read(file, size, deadline)
        return body if len(body) == size else None
