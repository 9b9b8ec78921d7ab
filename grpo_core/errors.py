"""What every error that is foreseen has in common."""

from __future__ import annotations


class GrpoError(Exception):
    """A foreseen error: its message says what is wrong and what to do, without a traceback."""


class ConfigError(GrpoError):
    """A configuration that breaks a rule; the message names each key, its value, the rule and a way out."""


class RewardError(GrpoError):
    """A reward that cannot be used, that broke its contract, or whose server is gone; the message says which.

    A reward function raises it for what no completion is to blame for. Training ends with a checkpoint then.
    """


class TrainingError(RuntimeError):
    """Training that must not go on; the message gives the step, the figure and what to try."""


class NotFiniteError(RuntimeError):
    """A NaN or infinity where training needs a number."""
