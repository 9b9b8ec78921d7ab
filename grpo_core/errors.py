"""Errors that a person can act on."""

from __future__ import annotations


class GrpoError(Exception):
    """An error that a person can act on: its message says what is wrong and what to do, and no traceback is shown."""


class ConfigError(GrpoError):
    """A configuration that breaks a rule; the message names each key, its value, the rule and a way out."""


class RewardError(GrpoError):
    """A reward that cannot be used, has broken its contract, or has lost its server; the message says which.

    A reward function raises it for a failure that no completion causes. The training then ends with a checkpoint.
    """


class TrainingError(RuntimeError):
    """The training must not continue; the message gives the step, the figure and what to try."""


class NotFiniteError(RuntimeError):
    """A NaN or infinity where training needs a number."""
