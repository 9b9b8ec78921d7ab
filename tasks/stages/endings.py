"""Makes a flow that ends early say why in plain words: the message of a GrpoError, or after a signal what is saved.

Prefect logs an exception with its traceback in the task and again in the flow, and calls every signal a crash. Here the
traceback of a GrpoError goes only to errors.log in the run's directory (`tasks.stages.run`) and to Prefect's log at
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
from typing import Any, ParamSpec, TypeVar, cast

from prefect import Flow, get_run_logger
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import FlowRun, State
from prefect.client.schemas.responses import OrchestrationResult, SetStateStatus
from prefect.context import FlowRunContext, TagsContext
from prefect.exceptions import Abort, Pause, TerminationSignal
from prefect.runtime import deployment
from prefect.states import Cancelled

from grpo_core.errors import GrpoError
from tasks.stages.attempts import crash_task_runs_left_open, repeat_suspension, schedule_again
from tasks.stages.errors import ArmStopped, Interrupted
from tasks.stages.stopped_in_prefect import is_stopped, stopping_with_run

P = ParamSpec("P")
R = TypeVar("R")
REPEATED = tuple(f"Finished in state {name}(" for name in ("Failed", "Cancelled", "Running"))  # Running if cancelled
LOGGERS = ("prefect.flow_runs", "prefect.task_runs", "prefect.engine")
# The server's words if a request is sent again because its answer was lost, and the first one has set the state.
SET_ALREADY = "This run has already made this state transition."
_set_state = SyncPrefectClient.set_flow_run_state


def end_in_plain_words(work: Callable[P, R]) -> Callable[P, R]:
    """Decorate a flow's function so that it ends in plain words.

    A GrpoError is raised to the caller, which prints it; in a deployment's run it is logged once. A signal cancels the
    flow run, and the caller gets Interrupted. A deployment's run that gets a signal continues later, by itself or, if
    it was suspended, when it is resumed (`schedule_again`), unless it was cancelled: then the signal is raised again.
    An arm that fell behind is cancelled too.
    """

    @functools.wraps(work)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        SyncPrefectClient.set_flow_run_state = _set_state_once
        for name in LOGGERS:
            logging.getLogger(name).addFilter(_demote_repeated)  # takes effect once, however often it is added
        if threading.current_thread() is threading.main_thread():
            # Set Python's handler again, over that of polars, which can lose a Ctrl-C.
            signal.signal(signal.SIGINT, signal.getsignal(signal.SIGINT))
        try:
            crash_task_runs_left_open()
            # Keeps tasks from inheriting the run's tags: for each tag, Prefect asks its server for a concurrency slot,
            # and waits two seconds if SQLite is still busy with the end of the task before.
            with TagsContext(current_tags=set()), stopping_with_run():
                return work(*args, **kwargs)
        except Pause as pause:  # Prefect raises it where a task ends, instead of what has ended the task
            if pause.state and is_stopped([pause.state], bool(deployment.id)):
                repeat_suspension()
                get_run_logger().info("suspended; Resume goes on with it")
            raise
        except Interrupted as error:
            interrupted = error
        except ArmStopped as stopped:
            return cast(R, Cancelled(message=str(stopped), data=stopped))
        except GrpoError as error:
            if deployment.id:
                get_run_logger().error("%s", error)
            raise
        except (KeyboardInterrupt, TerminationSignal) as error:
            interrupted = Interrupted("interrupted", error)
        if deployment.id:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # everything is saved, and the rest is short
            atexit.register(_exit_now)
            if then := schedule_again(interrupted.what):
                get_run_logger().info("%s; %s", interrupted.what, then)
                raise Abort("the state of this flow run is set already")
            get_run_logger().info("%s", interrupted)
            raise interrupted.signal
        cancelled = Cancelled(message=str(interrupted), data=interrupted)
        context = FlowRunContext.get()
        if context and context.flow and context.flow_run:
            _call_hooks(context.flow, context.flow_run, cancelled)
        return cast(R, cancelled)

    wrapper.__signature__ = inspect.signature(work, eval_str=True)  # type: ignore[attr-defined]
    return wrapper


def _set_state_once(client: SyncPrefectClient, *args: Any, **options: Any) -> OrchestrationResult[Any]:
    """Stands for `SyncPrefectClient.set_flow_run_state`. The answer to a request that was sent again is that of the
    first: the state is set.

    Prefect's engine takes it for another state, one without the flow's result, and would raise MissingResult at the end
    of a flow that has done everything.
    """
    answer = _set_state(client, *args, **options)
    if getattr(answer.details, "reason", "") == SET_ALREADY:
        answer.status = SetStateStatus.ACCEPT
    return answer


def _call_hooks(flow: Flow[..., Any], flow_run: FlowRun, cancelled: State) -> None:
    """Call the flow's hooks for a cancellation. Prefect does so only for a run that it has cancelled itself."""
    for hook in flow.on_cancellation_hooks or []:
        try:
            hook(flow, flow_run, cancelled)
        except Exception as error:  # as in Prefect, the run is cancelled all the same
            get_run_logger().warning("%s failed: %s", hook, error)


def _exit_now() -> None:
    """End the process of an interrupted run immediately. Called after Prefect has sent its logs and states.

    A normal exit frees everything that was imported. On a busy machine this takes so long that Prefect's runner kills
    the process and reports that it was perhaps out of memory.
    """
    sys.stdout.flush()
    os._exit(0)


def _demote_repeated(record: logging.LogRecord) -> bool:
    """Log filter: demote records to DEBUG if they repeat how a run ended."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, GrpoError) or str(record.msg).startswith(REPEATED):
        record.levelno, record.levelname = logging.DEBUG, logging.getLevelName(logging.DEBUG)
    return logging.getLogger(record.name).isEnabledFor(record.levelno)
