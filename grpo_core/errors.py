"""What every error that is foreseen has in common."""

from __future__ import annotations


class GrpoError(Exception):
    """A foreseen error: its message says what is wrong and what to do, without a traceback."""
