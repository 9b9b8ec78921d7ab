"""How a stage ends when it does not succeed."""

from __future__ import annotations

from grpo_core.errors import GrpoError


class StageError(GrpoError):
    """A stage that failed, or refused to start, for a reason a person can act on; the message says which."""

    exit_status = 1


class Interrupted(GrpoError):
    """A stage or flow ended by a signal; the message says what is saved. `signal`: the exception raised for it."""

    exit_status = 130

    def __init__(self, message: str, signal: BaseException):
        super().__init__(message)
        self.signal = signal
