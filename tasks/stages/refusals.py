"""How a flow that cannot go on says so: a foreseen error by its sentence, a signal by what is saved.

Prefect logs an exception with its traceback in the task and again in the flow, and calls every signal a crash. A
foreseen error's traceback is left to errors.log in the run's directory (`tasks.stages.stage`), and to Prefect's log at
DEBUG.
"""

from __future__ import annotations

import atexit
import functools
import inspect
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

from prefect import get_run_logger
from prefect.context import TagsContext
from prefect.exceptions import TerminationSignal
from prefect.runtime import deployment
from prefect.states import Cancelled

from grpo_core.errors import GrpoError
from tasks.stages.attempts import close_left_open
from tasks.stages.stage import Interrupted

P = ParamSpec("P")
R = TypeVar("R")
REPEATED = tuple(f"Finished in state {name}(" for name in ("Failed", "Cancelled", "Running"))  # Running: cancelled
LOGGERS = ("prefect.flow_runs", "prefect.task_runs", "prefect.engine")


def plain(work: Callable[P, R]) -> Callable[P, R]:
    """A flow's function that ends in plain words.

    In a deployment's run the log has the sentence of a foreseen error once; elsewhere the caller gets the error, and
    says it. A signal to a deployment's run is from Prefect's runner, and goes on; any other run is Cancelled by it, and
    the caller gets Interrupted.
    """

    @functools.wraps(work)
    def told(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in LOGGERS:
            logging.getLogger(name).addFilter(_quieten)  # once, however often it is added
        if threading.current_thread() is threading.main_thread():
            # Again, before the handler of polars, which lets Ctrl-C get lost.
            signal.signal(signal.SIGINT, signal.getsignal(signal.SIGINT))
        try:
            close_left_open()
            # Tasks would inherit the run's tags. Prefect asks its server for a concurrency slot for each tag of a task,
            # and waits two seconds where SQLite is busy with the end of the task before.
            with TagsContext(current_tags=set()):
                return work(*args, **kwargs)
        except Interrupted as error:
            interrupted = error
        except GrpoError as error:
            if deployment.id:
                get_run_logger().error("%s", error)
            raise
        except (KeyboardInterrupt, TerminationSignal) as error:
            interrupted = Interrupted("interrupted; run the same again to go on", error)
        if deployment.id:
            get_run_logger().info("%s", interrupted)
            atexit.register(_leave)
            raise interrupted.signal
        return cast(R, Cancelled(message=str(interrupted), data=interrupted))

    told.__signature__ = inspect.signature(work, eval_str=True)  # type: ignore[attr-defined]  # named where it stands
    return told


def _leave() -> None:
    """End the process of a cancelled run, once Prefect has sent its logs and states.

    Freeing all that was imported takes seconds, on a busy machine so many that Prefect's runner kills the process and
    suspects that it was out of memory.
    """
    sys.stdout.flush()
    os._exit(0)


def _quieten(record: logging.LogRecord) -> bool:
    """Demote what repeats how a run ended, which is said elsewhere."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, GrpoError) or str(record.msg).startswith(REPEATED):
        record.levelno, record.levelname = logging.DEBUG, logging.getLevelName(logging.DEBUG)
    return logging.getLogger(record.name).isEnabledFor(record.levelno)
