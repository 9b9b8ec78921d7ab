"""The event loop of this process's reward functions, and the time limits of their calls."""

from __future__ import annotations

import asyncio
import atexit
import signal
import threading
import time
from collections.abc import Awaitable, Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

GRACE = 1.0  # seconds after which a coroutine that blocks, or cleans up for long, is ended like any function

Item = TypeVar("Item")


class TimeIsUpError(BaseException):
    """The time limit is over. Not an Exception, so that a function's own `except Exception` does not swallow it."""


class _Loop(threading.local):
    """The event loop of this process's reward functions, one per thread. It is kept between batches, and with it what
    the functions keep: connections, semaphores, tasks.

    It runs only within `run`: the code between may run its own loops. Time in which it stands still does not count
    against any reward's time limit.
    """

    def __init__(self) -> None:
        self.runner: asyncio.Runner | None = None
        self.scopes: set[asyncio.Timeout] = set()  # of the calls under way
        self.stopped = time.monotonic()
        self.ran = 0.0  # seconds in total

    def get(self) -> asyncio.AbstractEventLoop:
        if not self.runner:
            self.runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
            atexit.register(self._close_at_exit)
        return self.runner.get_loop()

    def run(self, work: Awaitable[Item]) -> Item:
        """Return the result of the work, which is cancelled if an interrupt or a time limit ends the running."""
        start = time.monotonic()
        stood = start - self.stopped

        async def catch_up_and_work() -> Item:
            for scope in self.scopes:
                if not scope.expired():
                    scope.reschedule((scope.when() or 0.0) + stood)
            return await work

        task = self.get().create_task(catch_up_and_work())
        try:
            return self.get().run_until_complete(task)
        finally:
            self.stopped = time.monotonic()
            self.ran += self.stopped - start
            self.cancel([task])

    def cancel(self, tasks: Collection[asyncio.Task[Any]]) -> None:
        """Cancel those that are not done. One that ignores it is abandoned, and the loop with it."""
        under_way = [task for task in tasks if not (task.done() or task.get_loop().is_closed())]
        for task in under_way:
            task.cancel()
        if under_way:
            try:
                with time_limit(GRACE):
                    self.get().run_until_complete(asyncio.gather(*under_way, return_exceptions=True))
            except TimeIsUpError:
                self.close()

    def close(self) -> None:
        """Cancel what is under way and end the loop; the next call gets a new one."""
        runner, self.runner = self.runner, None
        if runner:
            with suppress(TimeIsUpError), time_limit(GRACE):
                runner.close()

    def _close_at_exit(self) -> None:
        try:
            self.close()
        except RuntimeError as error:
            # Where a reward has used a thread, asyncio waits for it in a thread of its own, which Python 3.12 no longer
            # starts at exit; all else has ended by then.
            if "interpreter shutdown" not in str(error):
                raise


loop = _Loop()


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeIsUpError in the block after `seconds`, also while it waits or a regular expression runs on, and again
    every GRACE seconds if the block swallows it.

    A function that uses SIGALRM itself (math_verify does) takes the timer over while it runs and has its own limits.
    Signals reach the main thread only: in any other thread there is no limit.
    """

    def time_is_up(*_: Any) -> None:
        raise TimeIsUpError

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGALRM, time_is_up)
    timer = signal.setitimer(signal.ITIMER_REAL, seconds, GRACE)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler)
