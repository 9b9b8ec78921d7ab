"""What every error that is foreseen has in common."""

from __future__ import annotations


class GrpoError(Exception):
    """A foreseen error: its message tells a person what is wrong and what to do, so nobody needs its traceback."""
