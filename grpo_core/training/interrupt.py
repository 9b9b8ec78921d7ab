"""On SIGTERM or SIGINT, a training stops where its state is whole: between two updates.

Until an update changes the weights, everything that it did can be done again, so a stop does not wait for its end:
`interruptible` ends immediately, and the state after the last complete update is saved.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from accelerate import Accelerator

from grpo_core.distributed import any_process
from grpo_core.errors import RolloutError
from grpo_core.training.state import random_state, set_random_state

EXIT_STATUS = 128 + signal.SIGTERM  # of a training that was told to stop


class Stopped(KeyboardInterrupt):
    """Told to stop. It is a KeyboardInterrupt, which asyncio lets pass; a reward function may swallow an Exception."""


@dataclass
class _Told:
    """State of a stop; one per process, since signals reach the process, not a session."""

    to_stop: bool = False
    may_raise: bool = False
    raised: bool = False


_told = _Told()


@contextmanager
def stop_signals() -> Iterator[None]:
    """Turn SIGTERM and SIGINT into one request to stop. Does nothing outside the main thread, which gets no signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _told.to_stop = _told.may_raise = _told.raised = False
    former = {number: signal.signal(number, _note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


@contextmanager
def interruptible(accelerator: Accelerator) -> Iterator[None]:
    """Let a stop end the block with Stopped, until its `commit`. After Stopped or a RolloutError, the random states are
    those from before the block.

    Several processes have to stop at the same place: where the block begins, and at each `stop_if_asked`.
    """
    before = random_state()
    try:
        try:
            _told.may_raise = accelerator.num_processes == 1
            stop_if_asked()
            yield
        finally:
            _told.may_raise = False
    except BaseException as error:
        if not (_told.raised or isinstance(error, RolloutError)):
            raise
        set_random_state(before)
        if isinstance(error, Stopped) or not _told.raised:
            raise
        raise Stopped from error  # the error came of being left half way


def stop_if_asked() -> None:
    """Raises Stopped on all processes if one of them was told to stop. Called by every process."""
    if any_process(_told.to_stop):
        _stop()


def commit() -> None:
    """Declare that the weights change from here on: a stop now waits for the end of the update."""
    _told.may_raise = False


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Let a stop wait for the end of the block, and for the next `stop_if_asked`."""
    may_raise, _told.may_raise = _told.may_raise, False
    yield
    _told.may_raise = may_raise


def _note(*_: object) -> None:
    again, _told.to_stop = _told.to_stop, True
    if _told.may_raise and not again:
        _stop()


def _stop() -> None:
    _told.raised = True
    raise Stopped
