"""Start and end of a process that imports large libraries, without the seconds that Python's collector takes."""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """Switch Python's collector off around imports: what they make lives as long as the process. A third of the time of
    importing torch and transformers goes into searching it for garbage."""
    if not gc.isenabled():  # switched off already
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def run_and_leave(main: Callable[[], object]) -> None:
    """Call a program's main function, and end the process with its exit status after the exit handlers it registers.

    Python would then free each object that was imported, which takes seconds; the system takes all memory at once.
    """
    status = 1

    def leave() -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

    atexit.register(leave)  # the first to be registered is the last to be called
    try:
        main()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        raise
