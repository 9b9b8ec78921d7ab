"""The deployments of `grpo serve`, in one process on one machine: pipeline, sweep, each stage, promotion, rollback and
clean.

prefect.yaml declares the same flows for work pools, whose workers are started by `grpo worker`.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import Any

from prefect import Flow
from prefect.client.orchestration import get_client
from prefect.deployments.runner import EntrypointType, RunnerDeployment
from prefect.exceptions import ObjectNotFound
from prefect.runner import Runner
from prefect.schedules import Cron
from prefect.settings import PREFECT_API_URL

from flows.clean import clean
from flows.pipeline import pipeline
from flows.promotion import promote, rollback
from flows.serving.environment import TAG
from flows.stages import FLOWS
from flows.sweep import sweep

NAME = "local"  # pipeline/local, train/local, …
NIGHTLY = Cron("0 2 * * *", timezone="UTC", active=False, slug="nightly")
WEEKLY = Cron("0 5 * * 0", timezone="UTC", active=False, slug="weekly")


def deployments() -> list[RunnerDeployment]:
    """All deployments. The pipeline's has a nightly schedule and that of clean a weekly one, which are off until
    somebody switches them on.

    If the server knows a deployment already, its schedules stay as its users left them.
    """
    offered = [
        _deployment(pipeline, [TAG], schedule=NIGHTLY),
        _deployment(sweep, [TAG]),
        *(_deployment(stage, [TAG, "stage"]) for stage in FLOWS.values()),
        *(_deployment(registry, [TAG, "registry"]) for registry in (promote, rollback)),
        _deployment(clean, [TAG], schedule=WEEKLY),
    ]
    for scheduled in (offered[0], offered[-1]):
        if _is_known(scheduled.full_name):
            scheduled.schedules = []
            scheduled.model_fields_set.difference_update({"schedules", "paused"})  # only fields that are set are sent
    return offered


def serve() -> None:
    """Run what is triggered, until SIGTERM."""
    # By default, the runner switches schedules off when it ends, and somebody would have to switch them on again.
    runner = _Runner(pause_on_shutdown=False)
    names = []
    for offered in deployments():
        runner.add_deployment(offered)
        names.append(offered.full_name)
    page = f"{PREFECT_API_URL.value().removesuffix('/api')}/deployments"
    print(f"Serving {', '.join(names)}\nReady: start a run at {page}. Ctrl-C ends all of it.", flush=True)
    with suppress(asyncio.CancelledError):
        asyncio.run(_run(runner))


class _Runner(Runner):
    """Prefect's runner, which on SIGTERM cancels the task that serves. Prefect's own handler raises SystemExit anywhere
    in the event loop, which may end in tracebacks."""

    serving: asyncio.Task[None] | None = None

    def handle_sigterm(self, *_: Any, **__: Any) -> None:
        if self.serving:
            self.serving.get_loop().call_soon_threadsafe(self.serving.cancel)


async def _run(runner: _Runner) -> None:
    runner.serving = asyncio.current_task()
    logging.getLogger("prefect.runner.process_manager").addFilter(_is_no_lookup_error)
    await runner.start()


def _is_no_lookup_error(record: logging.LogRecord) -> bool:
    """Log filter: drop the traceback that Prefect's runner, when it ends, logs for each flow run whose process has just
    ended."""
    return not (record.exc_info and isinstance(record.exc_info[1], ProcessLookupError))


def _deployment(flow: Flow, tags: list[str], **options: Any) -> RunnerDeployment:
    # By module, so that a flow run finds it whichever folder it starts in.
    made = flow.to_deployment(NAME, tags=tags, entrypoint_type=EntrypointType.MODULE_PATH, **options)
    assert isinstance(made, RunnerDeployment)  # a coroutine only where an event loop runs
    return made


def _is_known(name: str) -> bool:
    with get_client(sync_client=True) as client:
        try:
            client.read_deployment_by_name(name)
        except ObjectNotFound:
            return False
    return True
