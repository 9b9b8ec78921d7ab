"""The errors by which a stage ends if it does not succeed."""

from __future__ import annotations

from signal import SIGINT

from grpo_core.errors import GrpoError


class StageError(GrpoError):
    """Raised if a stage failed, or refused to start, for a reason that a person can act on; the message says which."""

    exit_status = 1


class ArmStopped(StageError):
    """Raised if a sweep's training was ended because its arm fell behind the arms before it; the message says when."""


class Interrupted(GrpoError):
    """Raised if a signal ended a stage or flow. `what`: what was interrupted and what is saved; `signal`: the exception
    that the signal raised. Exit status as in a shell: 130 for Ctrl-C, 143 for SIGTERM."""

    def __init__(self, what: str, signal: BaseException):
        super().__init__(f"{what}; run the same again to continue")
        self.what, self.signal = what, signal
        self.exit_status = 128 + getattr(signal, "signal", SIGINT)
