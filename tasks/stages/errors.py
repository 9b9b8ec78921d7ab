"""How a stage ends when it does not succeed."""

from __future__ import annotations

from signal import SIGINT

from grpo_core.errors import GrpoError


class StageError(GrpoError):
    """A stage that failed, or refused to start, for a reason a person can act on; the message says which."""

    exit_status = 1


class ArmStopped(StageError):
    """The training of a sweep's arm that fell behind the arms before it, and was ended for that; the message says
    when."""


class Interrupted(GrpoError):
    """A stage or flow ended by a signal. `what`: what was interrupted and what is saved; `signal`: the exception raised
    for it. The exit status is a shell's for that signal: 130 for Ctrl-C, 143 for SIGTERM."""

    def __init__(self, what: str, signal: BaseException):
        super().__init__(f"{what}; run the same again to go on")
        self.what, self.signal = what, signal
        self.exit_status = 128 + getattr(signal, "signal", SIGINT)
