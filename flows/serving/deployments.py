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
from flows.parameters.form import configs, describe_presets, presets
from flows.pipeline import describe, pipeline
from flows.promotion import promote, rollback
from flows.serving.environment import POLL_SECONDS, TAG
from flows.stages import FLOWS
from flows.sweep import sweep
from tasks.stages.prefect_address import HTTP_ERROR

LOG = logging.getLogger("prefect.serving")  # below Prefect's own, to look like the lines around it
NAME = "local"  # pipeline/local, train/local, …
WEEKLY = Cron("0 5 * * 0", timezone="UTC", active=False, slug="weekly")  # until somebody switches it on
# What users may have changed of a deployment that the server knows. Only fields that are set are sent.
OF_USERS = {"schedules", "paused", "concurrency_limit", "concurrency_options"}
RETRY_SECONDS = 30


def deployments() -> list[RunnerDeployment]:
    """All deployments. If the server knows one already, its schedules, pause and limit stay as its users left them."""
    return [
        *_with_presets(),
        *(_deployment(stage, [TAG, "stage"]) for stage in FLOWS.values()),
        *(_deployment(registry, [TAG, "registry"]) for registry in (promote, rollback)),
        _deployment(clean, [TAG], schedule=WEEKLY),
    ]


def _with_presets() -> list[RunnerDeployment]:
    return [_deployment(pipeline, [TAG], description=describe()), _deployment(sweep, [TAG])]


def serve() -> None:
    """Run what is triggered, until SIGTERM."""
    # By default, the runner switches schedules off when it ends, and somebody would have to switch them on again.
    runner = _Runner(pause_on_shutdown=False)
    names, described = [], describe_presets()
    for offered in deployments():
        runner.add_deployment(offered)
        names.append(offered.full_name)
    print(f"Presets from {configs()}: {', '.join(presets()) or 'none yet'}; a file put there is offered at once")
    page = f"{PREFECT_API_URL.value().removesuffix('/api')}/deployments"
    print(f"Serving {', '.join(names)}\nReady: start a run at {page}. Ctrl-C ends all of it.", flush=True)
    with suppress(asyncio.CancelledError):
        asyncio.run(_run(runner, described))


class _Runner(Runner):
    """Prefect's runner, which on SIGTERM cancels the task that serves. Prefect's own handler raises SystemExit anywhere
    in the event loop, which may end in tracebacks."""

    serving: asyncio.Task[None] | None = None

    def handle_sigterm(self, *_: Any, **__: Any) -> None:
        if self.serving:
            self.serving.get_loop().call_soon_threadsafe(self.serving.cancel)


async def _run(runner: _Runner, described: str) -> None:
    runner.serving = asyncio.current_task()
    logging.getLogger("prefect.runner.process_manager").addFilter(_is_no_lookup_error)
    await asyncio.gather(runner.start(), _follow_presets(described))


async def _follow_presets(offered: str) -> None:
    """Offer the presets again whenever they differ from those offered: a file is added, removed or changed."""
    while True:
        await asyncio.sleep(POLL_SECONDS)
        if (found := describe_presets()) == offered:
            continue
        try:
            await asyncio.to_thread(lambda: [it.apply() for it in _with_presets()])
        except HTTP_ERROR as error:
            LOG.warning("the changed presets of %s cannot be offered yet: %r", configs(), error)
            await asyncio.sleep(RETRY_SECONDS)
            continue
        offered = found
        LOG.info("Presets from %s: %s", configs(), ", ".join(presets()) or "none")


def _is_no_lookup_error(record: logging.LogRecord) -> bool:
    """Log filter: drop the traceback that Prefect's runner, when it ends, logs for each flow run whose process has just
    ended."""
    return not (record.exc_info and isinstance(record.exc_info[1], ProcessLookupError))


def _deployment(flow: Flow, tags: list[str], **options: Any) -> RunnerDeployment:
    # By module, so that a flow run finds it whichever folder it starts in.
    made = flow.to_deployment(NAME, tags=tags, entrypoint_type=EntrypointType.MODULE_PATH, **options)
    assert isinstance(made, RunnerDeployment)  # a coroutine only where an event loop runs
    if _is_known(made.full_name):
        made.schedules = []
        made.model_fields_set.difference_update(OF_USERS)
    return made


def _is_known(name: str) -> bool:
    with get_client(sync_client=True) as client, suppress(ObjectNotFound):
        client.read_deployment_by_name(name)
        return True
    return False
