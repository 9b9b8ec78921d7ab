"""Errors that a person can act on, each with the exit status of the command that it ends."""

from __future__ import annotations

import os
from collections.abc import Mapping

LOST_PEER = os.EX_TEMPFAIL  # exit status of a training process that failed because it lost another one


def install(extra: str) -> str:
    """Command that installs an extra of this package, which no package index has: anyone could register its name."""
    return f"pip install -e '.[{extra}]' in the folder of grpo-flows"


class GrpoError(Exception):
    """An error that a person can act on: its message is a sentence that says what is wrong and what to do.

    `exit_status` is that of the command: 2 if it was refused before anything was started, 1 if it failed on the way,
    130 or 143 if it was interrupted.
    """

    exit_status = 2


class ConfigError(GrpoError):
    """A configuration that breaks a rule; the message names each key, its value, the rule and a way out."""


class RolloutError(GrpoError):
    """Completions that cannot be sampled or scored. Training ends with a checkpoint then."""


class EngineError(RolloutError):
    """An engine that cannot be used, or has lost its servers; the message says why, and what to do."""


class RewardError(RolloutError):
    """A reward that cannot be used, has broken its contract, or has lost its server; the message says which.

    A reward function raises it for a fault that is not the completion's.
    """


class TrainingError(GrpoError):
    """Training that must not continue; the message gives the step, the figure and what to try."""

    exit_status = 1


class NotFiniteError(RuntimeError):
    """A NaN or infinity where training needs a number. `metrics`: those of the update, if it got that far."""

    def __init__(self, message: str, metrics: Mapping[str, float] | None = None):
        super().__init__(message)
        self.metrics = dict(metrics or {})
